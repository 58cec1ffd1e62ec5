// The list of conversations: kept up to date while one of them is at work, and over a gateway that is away.
//
// Items stay the same elements from one reading to the next, so the one in use keeps its focus and its question.

import { make } from "./markdown.js";
import { call } from "./stream.js";

const LOOK_AGAIN_MS = 4000;
const PAGE_SIZE = 30;

export class ConversationList {
  // onOpen(id), onRemoved(id); onTrouble(error) is told what went wrong and returns true if waiting will not help;
  // onBack() is called when reading has worked, with whether it had not before.
  constructor(list, older, { onOpen, onRemoved, onTrouble, onBack }) {
    this.list = list;
    this.older = older;
    this.onOpen = onOpen;
    this.onRemoved = onRemoved;
    this.onTrouble = onTrouble;
    this.onBack = onBack;
    this.current = "";
    this.reading = 0;
    this.nextPage = "";
    this.timer = 0;
    this.down = false;
    older.addEventListener("click", () => this.read(true));
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.read(); });
  }

  async read(more = false) {
    const reading = ++this.reading;
    clearTimeout(this.timer);
    let page;
    try {
      const size = Math.min(500, Math.max(PAGE_SIZE, more ? 0 : this.list.children.length));
      const token = more ? `&page_token=${encodeURIComponent(this.nextPage)}` : "";
      page = await call("GET", `/v1/conversations?page_size=${size}${token}`);
    } catch (error) {
      if (reading !== this.reading || this.onTrouble(error)) return;
      this.down = true;
      this.lookAgain();
      return;
    }
    if (reading !== this.reading) return;
    this.show(page.conversations, more);
    this.nextPage = page.next_page_token;
    this.older.hidden = !this.nextPage;
    this.mark(this.current);
    const wasDown = this.down;
    this.down = false;
    this.onBack(wasDown);
    if (this.list.querySelector(".live")) this.lookAgain();
  }

  // While something may change by itself, or nothing could be read. A hidden tab looks when it is shown again.
  lookAgain() {
    this.timer = setTimeout(() => { if (!document.hidden) this.read(); }, LOOK_AGAIN_MS);
  }

  mark(id) {
    this.current = id;
    for (const item of this.list.children) {
      const current = item.dataset.id === id;
      item.classList.toggle("current", current);
      item.querySelector(".open").setAttribute("aria-current", String(current));
    }
  }

  show(conversations, more) {
    const items = new Map([...this.list.children].map((item) => [item.dataset.id, item]));
    const shown = new Set(conversations.map((conversation) => conversation.id));
    if (!more) items.forEach((item, id) => { if (!shown.has(id)) item.remove(); });
    let place = more ? null : this.list.firstElementChild;
    for (const conversation of conversations) {
      const item = items.get(conversation.id) || this.item(conversation.id);
      fill(item, conversation);
      if (item === place) place = place.nextElementSibling;
      else this.list.insertBefore(item, place);
    }
  }

  item(id) {
    const item = make("li");
    item.dataset.id = id;
    const open = make("button", "open");
    open.type = "button";
    open.append(make("span", "name"), make("span", "when"));
    open.addEventListener("click", () => this.onOpen(id));
    const remove = make("button", "remove", "\u00d7");
    remove.type = "button";
    remove.addEventListener("click", () => this.remove(id, remove));
    remove.addEventListener("blur", () => { remove.classList.remove("sure"); remove.textContent = "\u00d7"; });
    item.append(open, remove);
    return item;
  }

  async remove(id, button) {
    if (!button.classList.contains("sure")) {
      button.classList.add("sure");
      button.textContent = "Delete?";
      return;
    }
    try {
      await call("DELETE", `/v1/conversations/${encodeURIComponent(id)}`);
    } catch (error) {
      this.onTrouble(error, true);
      return;
    }
    const item = button.closest("li");
    const neighbour = item.nextElementSibling || item.previousElementSibling;
    if (neighbour) neighbour.querySelector(".open").focus();
    this.onRemoved(id);
    await this.read();
  }
}

function fill(item, conversation) {
  const live = Boolean(conversation.active_run_id);
  item.classList.toggle("live", live);
  item.querySelector(".name").textContent = conversation.title || "Untitled";
  item.querySelector(".when").textContent = live ? "in progress" : ago(conversation.update_time);
  item.querySelector(".remove").setAttribute("aria-label", `Delete ${conversation.title || "conversation"}`);
}

function ago(time) {
  const seconds = (Date.now() - Date.parse(time)) / 1000;
  if (!Number.isFinite(seconds)) return "";
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(time).toLocaleDateString(undefined, { day: "numeric", month: "short" });
}
