// Cards for what a run asks people: approve, reject, change the arguments, skip, or answer.
//
// Rules
// - A card shows arguments as the text the engine keeps, never parsed and printed again: a number that changed in a
//   round trip would be approved as something else than was shown. What was shown is named by its hash.
// - A press answers one question at once. The same request_id is used until the gateway has answered, so a lost
//   connection never answers twice; which segment follows is seen by whoever follows the run.
// - A card stays the same element while its question is open, so that nothing half typed is lost when another is answered.
// - When it is too late is the engine's word: clocks of browsers are wrong too often to take a button away for it.
// - Arguments are foreign text: characters that would hide or reorder others are spelt out, so that what is read is
//   what is approved.
// - Focus never falls off the page: it stays on a card that is answered, and goes to the next one, or to where one writes.
// - Words are sent as they are; where a question asks for something else by its schema, as the JSON they are.

import { make, spellOut } from "./markdown.js";
import { Refusal, answer } from "./stream.js";

const LABELS = { APPROVE: "Approve", REJECT: "Reject", EDIT: "Change the arguments", SKIP: "Skip", RESPOND: "Give the result myself" };
const COMMENTED = ["APPROVE", "REJECT", "SKIP"];
const TICK_MS = 10000;

export class Cards {
  // say(text) is given what is worth telling somebody who cannot see it.
  constructor(say = () => {}) {
    this.say = say;
    this.element = make("div", "cards");
    this.cards = new Map();   // by what identifies a question as it was shown
    this.runId = "";
    this.items = [];
  }

  // Shows the open questions of a run as GET /v1/runs/{id} tells them.
  show(run) {
    this.runId = run.id;
    this.items = run.interrupts;
    const kept = new Map();
    for (const item of run.interrupts) {
      const key = `${item.id} ${item.args_hash}`;
      kept.set(key, this.cards.get(key) || new Card(item, run.id));
    }
    for (const card of kept.values()) {
      if (card.element.isConnected) continue;
      this.element.append(card.element);
      this.say([card.title, card.item.prompt].filter(Boolean).join(": "));
    }
    this.keepOnly(kept);
  }

  clear() {
    this.items = [];
    this.keepOnly(new Map());
  }

  keepOnly(kept) {
    const hadFocus = this.element.contains(document.activeElement);
    for (const [key, card] of this.cards) {
      if (kept.has(key)) continue;
      if (!card.sent) this.say(`${card.title}: decided elsewhere, or too late`);
      card.close();
    }
    this.cards = kept;
    if (!hadFocus || this.element.contains(document.activeElement)) return;
    const next = kept.values().next().value;
    (next ? next.element : document.getElementById("question")).focus({ preventScroll: true });
  }

  // The card that a message answers: the only question, if there is exactly one; null otherwise.
  get byMessage() {
    const questions = [...this.cards.values()].filter((card) => card.isQuestion);
    return questions.length === 1 && questions[0].allows("RESPOND") ? questions[0] : null;
  }
}

class Card {
  constructor(item, runId) {
    this.item = item;
    this.runId = runId;
    this.isQuestion = item.kind === "INTERRUPT_KIND_QUESTION";
    this.element = make("section", this.isQuestion ? "card question-card" : "card");
    this.title = this.isQuestion ? "A question for you" : `${item.tool_name || "A step"} waits for approval`;
    this.sent = false;
    this.element.tabIndex = -1;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", this.title);
    this.element.append(spellOut(make("strong"), this.title));
    if (item.prompt) this.element.append(spellOut(make("p", "prompt"), item.prompt));
    if (item.path.length > 2) this.element.append(make("p", "small", `Asked by ${item.path.slice(0, -1).join(", ")}`));
    if (!this.isQuestion && item.tool_name) this.element.append(spellOut(make("pre"), item.args_json || "{}"));
    this.until = make("p", "small");
    this.ticking = 0;
    if (item.expire_time) {
      this.element.append(this.until);
      this.ticking = setInterval(() => this.tick(), TICK_MS);
      this.tick();
    }
    this.body = make("div", "choice");
    this.trouble = make("p", "trouble");
    this.trouble.setAttribute("role", "alert");
    this.element.append(this.body, this.trouble);
    if (this.isQuestion) this.drawQuestion();
    else this.drawApproval();
  }

  close() {
    clearInterval(this.ticking);
    this.element.remove();
  }

  tick() {
    const time = Date.parse(this.item.expire_time);
    this.until.textContent = time > Date.now() ? `Answer by ${clock(time)} (${span(time - Date.now())} left)` : `The time to answer ended at ${clock(time)}`;
  }

  allows(action) {
    return this.item.allowed_actions.includes(`DECISION_ACTION_${action}`);
  }

  drawApproval() {
    const buttons = make("div", "buttons");
    const comment = field("input", "Comment (may be empty)");
    const remember = make("input");
    remember.type = "checkbox";
    for (const [action, label] of Object.entries(LABELS)) {
      if (!this.allows(action)) continue;
      buttons.append(button(label, action === "APPROVE" ? "primary" : "", () => {
        if (action === "EDIT") this.drawText("The arguments as one JSON object", this.item.args_json || "{}", "Approve with these", (text) => this.send({ action, args_json: text }));
        else if (action === "RESPOND") this.drawText("The result", "", "Give this result", (text) => this.respond(text));
        else this.send({ action, comment: comment.value.trim(), remember: action === "APPROVE" && remember.checked ? "REMEMBER_SCOPE_CONVERSATION" : undefined });
      }));
    }
    const parts = [];
    if (COMMENTED.some((action) => this.allows(action))) parts.push(comment);
    if (this.allows("APPROVE") && this.item.tool_name) {
      const label = make("label", "small");
      label.append(remember, " approve this tool for the rest of this conversation");
      parts.push(label);
    }
    this.body.replaceChildren(...parts, buttons);
  }

  drawQuestion() {
    const { choices, only } = choicesOf(this.item.response_schema_json);
    const skip = this.allows("SKIP") ? [button("Skip", "", () => this.send({ action: "SKIP" }))] : [];
    const offered = this.allows("RESPOND") ? choices.map((choice) => button(words(choice), "", () => this.send({ action: "RESPOND", response_json: JSON.stringify(choice) }))) : [];
    if (this.allows("RESPOND") && !only) this.drawText("Your answer", "", "Answer", (text) => this.respond(text), skip);
    const buttons = make("div", "buttons");
    buttons.append(...offered, ...(this.allows("RESPOND") && !only ? [] : skip));
    this.body.prepend(buttons);
  }

  drawText(name, text, label, onSend, more = [button("Back", "", () => { this.drawApproval(); this.element.focus(); })]) {
    const input = field("textarea", name);
    input.value = text;
    const buttons = make("div", "buttons");
    buttons.append(button(label, "primary", () => { if (input.value.trim()) onSend(input.value.trim()); else input.focus(); }), ...more);
    this.body.replaceChildren(input, buttons);
    if (!this.isQuestion) input.focus();
  }

  // Also for words that were typed as a message.
  respond(text) {
    return this.send({ action: "RESPOND", response_json: responseOf(text, this.item.response_schema_json) });
  }

  // Resolves to true when the answer was taken.
  async send({ action, ...more }) {
    const controls = [...this.element.querySelectorAll("button, input, textarea")];
    if (this.element.contains(document.activeElement)) this.element.focus({ preventScroll: true });
    this.sent = true;
    for (const control of controls) control.disabled = true;
    this.trouble.textContent = "";
    try {
      await answer(this.runId, {
        interrupt_id: this.item.id, action: `DECISION_ACTION_${action}`, args_hash: this.item.args_hash, ...more,
      });
      this.element.classList.add("sent");
      return true;
    } catch (error) {
      this.sent = false;
      const known = error instanceof Refusal && error.reason === "ALREADY_ANSWERED";
      this.trouble.textContent = known ? "Somebody else has answered this already." : error instanceof Refusal ? error.message : "The gateway cannot be reached.";
      if (!known) for (const control of controls) control.disabled = false;
      return false;
    }
  }
}

function field(tag, name) {
  const input = make(tag);
  input.setAttribute("aria-label", name);
  input.placeholder = name;
  if (tag === "textarea") input.rows = 3;
  return input;
}

function button(label, className, onPress) {
  const element = make("button", className, label);
  element.type = "button";
  element.addEventListener("click", onPress);
  return element;
}

function clock(time) {
  const options = { hour: "2-digit", minute: "2-digit" };
  const other = new Date(time).toDateString() !== new Date().toDateString();
  return new Date(time).toLocaleString(undefined, other ? { day: "numeric", month: "short", ...options } : options);
}

function span(milliseconds) {
  const minutes = milliseconds / 60000;
  if (minutes < 1) return "less than a minute";
  return minutes < 120 ? `${Math.floor(minutes)} min` : minutes < 2880 ? `${Math.floor(minutes / 60)} h` : `${Math.floor(minutes / 1440)} days`;
}

function words(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function schemaOf(text) {
  try {
    const schema = JSON.parse(text || "{}");
    return schema && typeof schema === "object" ? schema : {};
  } catch {
    return {};
  }
}

// The answers a question names, and whether they are the only ones: one of `enum`, or, as offers, any of `anyOf`.
function choicesOf(text) {
  const schema = schemaOf(text);
  const offers = Array.isArray(schema.anyOf) ? schema.anyOf.find((one) => one && Array.isArray(one.enum)) : null;
  const choices = Array.isArray(schema.enum) ? schema.enum : offers ? offers.enum : [];
  return choices.length <= 12 ? { choices, only: Array.isArray(schema.enum) } : { choices: [], only: false };
}

function responseOf(text, schemaText) {
  const { type = "string", enum: choices } = schemaOf(schemaText);
  let value;
  try { value = JSON.parse(text); } catch { return JSON.stringify(text); }
  if (Array.isArray(choices)) return !choices.includes(text) && choices.includes(value) ? text : JSON.stringify(text);
  return type === "string" ? JSON.stringify(text) : text;
}
