// The page: which conversation is shown, what runs in it, and everything around the answers.
//
// The address holds the conversation (#id), so a reload or a shared tab comes back to it, also to a run that is
// still going on: its stored events are replayed and the live ones follow.

import { make } from "./markdown.js";
import { Refusal, RunStream, call, setKey } from "./stream.js";
import { Turn, finding, question as questionBubble, replay } from "./turn.js";

const $ = (id) => document.getElementById(id);
const turns = $("turns"), scroll = $("scroll"), input = $("question"), status = $("status");
const state = { conversation: "", agents: [], stream: null, turn: null, opening: 0, nextPage: "", pinned: true };

// ---- running

function begin(options) {
  const turn = new Turn(stick);
  turns.append(turn.element);
  turn.setLive(true);
  state.turn = turn;
  $("empty").hidden = true;
  const stream = new RunStream({
    ...options,
    onEvent: (event) => take(stream, turn, event),
    onLink: (up) => { if (state.stream === stream) say(up ? "" : "Connection lost, reconnecting", !up); },
  });
  state.stream = stream;
  refreshControls();
  stream.read()
    .catch((error) => {
      if (!explain(error)) turn.fail(sentence(error), null, "");
    })
    .finally(() => finish(stream, turn));
}

function take(stream, turn, event) {
  const parked = turn.parked;
  turn.apply(event);
  if (event.type === "done" && event.conversation_id && state.stream === stream && !state.conversation) {
    setConversation(event.conversation_id);
  }
  if (turn.parked !== parked) refreshControls();
}

function finish(stream, turn) {
  turn.setLive(false);
  if (stream.runId && stream.ended) {
    call("GET", `/v1/runs/${encodeURIComponent(stream.runId)}`)
      .then(({ run }) => {
        turn.setEnding(run);
        if (state.stream === null && state.turn === turn && !state.conversation) setConversation(run.conversation_id);
      })
      .catch(() => {});   // the footer is an extra; the answer is there
  }
  if (state.stream === stream) {
    state.stream = null;
    say("");
    refreshControls();
    listConversations();
  }
}

async function send(text) {
  leave();
  turns.append(questionBubble(text));
  state.pinned = true;
  const request = {
    conversation_id: state.conversation,
    request_id: randomId(),
    message: { role: "ROLE_USER", parts: [{ text }] },
  };
  if (state.agents.length > 1) request.agent = $("agent").value;
  if (!state.conversation) $("title").textContent = firstLine(text);
  begin({ request });
}

async function stop() {
  const { stream } = state;
  if (!stream) return;
  if (!stream.runId) {
    stream.close();
    return;
  }
  say("Stopping");
  try {
    await call("POST", `/v1/runs/${encodeURIComponent(stream.runId)}/cancel`, { reason: "stopped on the page" });
  } catch (error) {
    if (!explain(error)) say(sentence(error), true);
  }
}

function leave() {
  const { stream } = state;
  state.stream = null;
  if (stream) stream.close();
  say("");
}

// ---- conversations

async function listConversations(more = false) {
  const list = $("conversations");
  let page;
  try {
    const token = more ? `&page_token=${encodeURIComponent(state.nextPage)}` : "";
    page = await call("GET", `/v1/conversations?page_size=30${token}`);
  } catch (error) {
    explain(error);
    return;
  }
  const items = page.conversations.map(conversationItem);
  if (more) list.append(...items);
  else list.replaceChildren(...items);
  state.nextPage = page.next_page_token;
  $("older").hidden = !state.nextPage;
  markCurrent();
}

function conversationItem(conversation) {
  const item = make("li", conversation.active_run_id ? "live" : "");
  item.dataset.id = conversation.id;
  const open = make("button", "open");
  open.type = "button";
  open.append(make("span", "name", conversation.title || "Untitled"));
  open.append(make("span", "when", conversation.active_run_id ? "in progress" : ago(conversation.update_time)));
  open.addEventListener("click", () => openConversation(conversation.id));
  const remove = make("button", "remove", "\u00d7");
  remove.type = "button";
  remove.setAttribute("aria-label", `Delete ${conversation.title || "conversation"}`);
  remove.addEventListener("click", () => removeConversation(conversation.id, remove));
  remove.addEventListener("blur", () => { remove.classList.remove("sure"); remove.textContent = "\u00d7"; });
  item.append(open, remove);
  return item;
}

async function removeConversation(id, button) {
  if (!button.classList.contains("sure")) {
    button.classList.add("sure");
    button.textContent = "Delete?";
    return;
  }
  try {
    await call("DELETE", `/v1/conversations/${encodeURIComponent(id)}`);
    if (state.conversation === id) fresh();
    await listConversations();
  } catch (error) {
    if (!explain(error)) say(sentence(error), true);
  }
}

async function openConversation(id) {
  leave();
  drawer(false);
  const opening = ++state.opening;
  setConversation(id);
  turns.replaceChildren();
  $("empty").hidden = true;
  try {
    const { conversation } = await call("GET", `/v1/conversations/${encodeURIComponent(id)}`);
    let messages = await allMessages(id);
    if (opening !== state.opening) return;
    $("title").textContent = conversation.title || "Untitled";
    const runId = conversation.active_run_id;
    // The events of a run that goes on bring everything after its question.
    if (runId) messages = messages.slice(0, messages.findLastIndex((message) => message.role === "ROLE_USER") + 1);
    turns.replaceChildren(...replay(messages));
    state.pinned = true;
    if (runId) begin({ runId });
    requestAnimationFrame(stick);
  } catch (error) {
    if (opening === state.opening && !explain(error)) {
      turns.replaceChildren(finding({ severity: "error", summary: "This conversation cannot be shown", detail: sentence(error) }));
    }
  }
  if (matchMedia("(pointer: fine)").matches) input.focus();
}

async function allMessages(id) {
  const messages = [];
  let token = "";
  do {
    const path = `/v1/conversations/${encodeURIComponent(id)}/messages?page_size=500&page_token=${encodeURIComponent(token)}`;
    const page = await call("GET", path);
    messages.push(...page.messages);
    token = page.next_page_token;
  } while (token);
  return messages;
}

function fresh() {
  leave();
  drawer(false);
  state.opening += 1;
  setConversation("");
  turns.replaceChildren();
  $("title").textContent = "New conversation";
  $("empty").hidden = false;
  refreshControls();
  input.focus();
}

function setConversation(id) {
  state.conversation = id;
  history.replaceState(null, "", id ? `#${encodeURIComponent(id)}` : location.pathname);
  markCurrent();
}

function markCurrent() {
  for (const item of $("conversations").children) {
    const current = item.dataset.id === state.conversation;
    item.classList.toggle("current", current);
    item.querySelector(".open").setAttribute("aria-current", String(current));
  }
}

// ---- agents

async function listAgents() {
  try {
    state.agents = (await call("GET", "/v1/agents?page_size=500")).agents;
  } catch (error) {
    if (!explain(error)) say(sentence(error), true);
    return;
  }
  $("agent").replaceChildren(...state.agents.map((agent) => {
    const option = make("option", "", agent.name);
    option.value = agent.name;
    return option;
  }));
  $("agent-label").hidden = state.agents.length < 2;
  describeAgent();
}

function describeAgent() {
  const agent = state.agents.find((one) => one.name === $("agent").value) || state.agents[0];
  $("about").textContent = agent ? agent.description : "";
  $("tools").replaceChildren(...(agent ? agent.tools : []).map((tool) => {
    const item = make("li", "", tool.name);
    item.title = tool.description;
    return item;
  }));
}

// ---- small things

function say(text, trouble = false) {
  status.textContent = text;
  status.classList.toggle("trouble", trouble);
}

// Handles what the whole page answers to: a missing key. True when it did.
function explain(error) {
  if (!(error instanceof Refusal) || error.status !== 401) return false;
  if (!$("login").open) $("login").showModal();
  return true;
}

function sentence(error) {
  return error instanceof TypeError ? "The gateway cannot be reached." : error.message;
}

function refreshControls() {
  const running = Boolean(state.stream) && !(state.turn && state.turn.parked);
  $("stop").hidden = !state.stream;
  $("send").hidden = running;
  $("send").disabled = running || !input.value.trim();
}

function stick() {
  if (state.pinned) scroll.scrollTop = scroll.scrollHeight;
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

function drawer(shown) {
  $("sidebar").classList.toggle("shown", shown);
  $("menu").setAttribute("aria-expanded", String(shown));
  $("shade").hidden = !shown;
  if (shown) $("new").focus();
}

function firstLine(text) {
  return text.trim().split("\n")[0].slice(0, 200);
}

function randomId() {
  // randomUUID needs a secure context, which plain http on a LAN is not.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function ago(time) {
  const seconds = (Date.now() - Date.parse(time)) / 1000;
  if (!Number.isFinite(seconds)) return "";
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(time).toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value.trim();
  if (!text || $("send").disabled || $("send").hidden) return;
  input.value = "";
  grow();
  send(text);
});
input.addEventListener("input", () => { grow(); refreshControls(); });
input.addEventListener("keydown", (event) => {
  // While an input method composes (Chinese, Japanese, ...), Enter chooses a word.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
// Only scrolling up lets go of the end: scroll events come late, when more text has already made the page longer.
let lastTop = 0;
scroll.addEventListener("scroll", () => {
  if (scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60) state.pinned = true;
  else if (scroll.scrollTop < lastTop - 2) state.pinned = false;
  lastTop = scroll.scrollTop;
}, { passive: true });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") drawer(false); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && !state.stream) listConversations(); });
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", fresh);
$("older").addEventListener("click", () => listConversations(true));
$("menu").addEventListener("click", () => drawer(!$("sidebar").classList.contains("shown")));
$("shade").addEventListener("click", () => drawer(false));
$("agent").addEventListener("change", describeAgent);
$("login-form").addEventListener("submit", () => {
  setKey($("key").value.trim());
  $("key").value = "";
  start();
});
window.addEventListener("hashchange", () => {
  const id = decodeURIComponent(location.hash.slice(1));
  if (id !== state.conversation) (id ? openConversation(id) : fresh());
});

function start() {
  listAgents();
  listConversations();
  const id = decodeURIComponent(location.hash.slice(1));
  if (id) openConversation(id);
  else input.focus();
}

start();
