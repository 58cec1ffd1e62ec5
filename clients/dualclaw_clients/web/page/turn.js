// The view of one answer: it takes events and keeps text, reasoning and the timeline of steps up to date.
//
// Events change plain state at once; the page is drawn at most once per animation frame, however many arrive.

import { Cards } from "./cards.js";
import { make, renderInto } from "./markdown.js";
import { parseJson } from "./stream.js";
import { Timeline, finding, isWaiting } from "./timeline.js";

const ENDINGS = {
  STEP_LIMIT: "Step limit reached", BUDGET_EXCEEDED: "Budget used up", LOOP_DETECTED: "Stopped: it went in circles",
  REJECTED: "Ended after a refusal", CANCELLED: "Stopped",
};

export class Turn {
  // onDraw() is called when the page has changed, say(text) with what is worth telling somebody who cannot see it.
  constructor(onDraw = () => {}, say = () => {}) {
    this.onDraw = onDraw;
    this.say = say;
    this.text = "";
    this.shown = "";          // text that a rewind took back, kept on the page until the new text differs
    this.before = [];         // texts of earlier segments, which stay above it
    this.reasoning = "";
    this.told = 0;            // how much of the reasoning the timeline already has as thinking steps
    this.timeline = new Timeline();
    this.live = false;
    this.parked = false;      // it waits for people
    this.over = false;        // a segment has ended, and no later one has begun
    this.frame = 0;
    this.element = make("article", "turn");
    this.element.setAttribute("aria-label", "Answer");
    this.thought = make("details", "reasoning");
    this.thoughtTitle = make("summary", "", "Thinking");
    this.thoughtBody = make("div", "thought");
    this.thought.append(this.thoughtTitle, this.thoughtBody);
    this.answer = make("div", "answer");
    this.waiting = make("p", "waiting", "Working");
    this.notes = make("div", "notes");
    this.cards = new Cards(say);
    this.foot = make("p", "foot");
    this.copy = make("button", "copy", "Copy");
    this.copy.type = "button";
    this.copy.addEventListener("click", () => this.copyText());
    const end = make("div", "end");
    end.append(this.foot, this.copy);
    this.element.append(this.timeline.element, this.thought, this.answer, this.waiting, this.notes, this.cards.element, end);
    this.draw();
  }

  // What a reader sees: text that was taken back until the new text has caught up with it, or differs.
  get visible() {
    return this.shown.length > this.text.length && this.shown.startsWith(this.text) ? this.shown : this.text;
  }

  // A live turn is being written, which its answer says to screen readers by being busy.
  setLive(live) {
    this.live = live;
    if (!live) this.shown = "";
    this.schedule();
  }

  apply(event) {
    if (this.over) this.beginSegment(event.type === "interrupt");
    switch (event.type) {
      case "delta":
        this.text += event.content;
        break;
      case "reasoning":
        this.reasoning += event.content;
        break;
      case "step":
        this.setStep(event.index, event.step);
        this.tell(event.step, isWaiting(event.step));
        break;
      case "rewind":
        if (this.visible.length > event.content.length) this.shown = this.visible;
        this.text = event.content;
        this.reasoning = event.reasoning || "";
        this.told = Math.min(this.told, this.reasoning.length);
        break;
      case "interrupt":
        this.parked = true;
        break;
      case "done":
        this.over = true;
        this.text = event.content;
        this.shown = "";
        event.process_steps.forEach((step, index) => this.setStep(index, step));
        this.told = this.reasoning.length;
        if (event.generating) this.foot.textContent = "Media is still being generated";
        break;
      case "error":
        this.over = true;
        this.shown = "";
        this.fail(event.message, event.diagnosis, event.trace_id);
        break;
    }
    this.schedule();
  }

  // After a parked phase the next segment brings text of its own; the text before it stays above. One that asks on
  // right away keeps the cards of what is still open.
  beginSegment(asksOn) {
    this.over = this.parked = false;
    if (!asksOn) this.cards.clear();
    this.drawNow();
    if (this.text) {
      const before = make("div", "answer past");
      renderInto(before, this.text);
      this.answer.before(before);
      this.before.push(this.text);
    }
    this.text = this.shown = this.reasoning = "";
    this.told = 0;
  }

  setStep(index, step) {
    const thinking = step.type === "thinking";
    if (this.timeline.set(index, step, thinking && this.thought.open) && thinking) {
      // What was read while it came in moves into the timeline, and stays open there if it was.
      this.told = this.reasoning.length;
      this.thought.open = false;
    }
  }

  tell({ type, name, phase, diagnosis }, waits) {
    if (type === "thinking" || waits) return;   // what waits is told by its card
    if (phase === "start") this.say(`${name} is running`);
    else if (phase === "fail") this.say([`${name} failed`, diagnosis && diagnosis.summary].filter(Boolean).join(": "));
  }

  fail(message, diagnosis, traceId) {
    const box = finding({ severity: "error", summary: message, ...strip(diagnosis, message) }, traceId);
    if (this.live) box.setAttribute("role", "alert");
    this.notes.append(box);
    this.schedule();
  }

  // What only the run knows: why it stopped and what it used.
  setEnding(run) {
    const reason = String(run.stop_reason || "").replace("STOP_REASON_", "");
    const usage = run.usage || {};
    const parts = [ENDINGS[reason] || ""];
    if (usage.input_tokens !== undefined || usage.output_tokens !== undefined) {
      const count = (value) => (value === undefined ? "?" : value.toLocaleString("en"));
      parts.push(`${count(usage.input_tokens)} tokens in, ${count(usage.output_tokens)} out`);
    }
    this.foot.textContent = parts.filter(Boolean).join(" · ") || this.foot.textContent;
    this.schedule();
  }

  schedule() {
    // A hidden tab gets no animation frames; a timer keeps it right there.
    if (!this.frame) this.frame = document.hidden ? setTimeout(() => this.drawNow(), 200) : requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    this.frame = 0;
    this.draw();
    this.onDraw();
  }

  draw() {
    if (this.visible === this.text) this.shown = "";
    renderInto(this.answer, this.visible);
    this.answer.classList.toggle("rewriting", Boolean(this.shown));
    this.answer.setAttribute("aria-busy", String(this.live));   // not before the last piece can be read
    const thinking = this.reasoning.slice(this.told);
    this.thought.hidden = !thinking;
    if (this.thoughtBody.textContent !== thinking) this.thoughtBody.textContent = thinking;
    this.timeline.draw();
    this.element.classList.toggle("live", this.live && !this.parked);
    this.waiting.hidden = !this.live || this.parked || this.timeline.busy || Boolean(this.text) || Boolean(thinking);
    this.copy.hidden = this.live || !this.text || !navigator.clipboard;   // there is none on plain http beyond loopback
  }

  async copyText() {
    const texts = [...this.before, this.text].filter(Boolean);
    try {
      await navigator.clipboard.writeText(texts.join("\n\n"));
      this.copy.textContent = "Copied";
    } catch {
      this.copy.textContent = "The browser does not allow it";
    }
    this.say(this.copy.textContent);
    setTimeout(() => { this.copy.textContent = "Copy"; }, 2000);
  }
}

function strip(diagnosis, message) {
  if (!diagnosis) return {};
  return { ...diagnosis, summary: message || diagnosis.summary, detail: diagnosis.summary === message ? diagnosis.detail : [diagnosis.summary, diagnosis.detail].filter(Boolean).join("\n") };
}

// The messages of a stored conversation as question bubbles and finished turns. `runs`, the oldest first, tell how
// each answer ended, if there is one for each question; a run that failed early may have left no message at all.
export function replay(messages, runs = []) {
  const nodes = [];
  const questions = messages.filter((message) => message.role === "ROLE_USER").length;
  const endings = runs.length === questions ? [...runs] : [];
  let turn = null;
  let calls = new Map();
  const begin = () => {
    turn = new Turn();
    calls = new Map();
    nodes.push(turn.element);
  };
  const end = (run) => {
    if (!run || !["RUN_STATE_SUCCEEDED", "RUN_STATE_FAILED", "RUN_STATE_CANCELLED"].includes(run.state)) return;
    if (!turn) begin();
    turn.setEnding(run);
    if (run.error) turn.fail(run.error.message, stored(run.error.diagnosis), "");
  };
  let asked = false;
  for (const message of messages) {
    if (message.role === "ROLE_USER") {
      if (asked) end(endings.shift());
      asked = true;
      nodes.push(question(textOf(message.parts)));
      turn = null;
      continue;
    }
    if (message.role !== "ROLE_ASSISTANT" && message.role !== "ROLE_TOOL") continue;
    if (!turn) begin();
    for (const part of message.parts) {
      if (part.text) turn.text += (turn.text && !/\s$/.test(turn.text) ? "\n\n" : "") + part.text;
      else if (part.reasoning && part.reasoning.text) turn.setStep(undefined, { type: "thinking", text: part.reasoning.text });
      else if (part.tool_call) calls.set(part.tool_call.id, storedCall(turn, part.tool_call));
      else if (part.tool_result) storedResult(turn, calls.get(part.tool_result.call_id), part.tool_result);
    }
    turn.schedule();
  }
  if (asked) end(endings.shift());
  return nodes;
}

export function question(text) {
  const bubble = make("div", "question", text);
  bubble.setAttribute("role", "article");
  bubble.setAttribute("aria-label", "Question");
  return bubble;
}

function storedCall(turn, call) {
  let args = {};
  try { args = parseJson(call.args_json || "{}"); } catch { /* readers never fail: it reads as no arguments */ }
  const step = { type: call.kind.replace("STEP_KIND_", "").toLowerCase(), name: call.name, server: call.server, args, result: "" };
  const place = `call ${call.id}`;
  turn.setStep(place, step);
  return { place, step };
}

function storedResult(turn, call, result) {
  if (!call) return;
  const diagnosis = stored(result.diagnosis);
  turn.setStep(call.place, { ...call.step, result: textOf(result.parts), phase: result.is_error ? "fail" : "ok", diagnosis });
}

// A diagnosis as the stored messages have it, in the form events have.
function stored(diagnosis) {
  if (!diagnosis || !diagnosis.summary) return undefined;
  return { ...diagnosis, severity: diagnosis.severity.replace("SEVERITY_", "").toLowerCase() };
}

function textOf(parts) {
  return parts.map((part) => part.text || (part.image ? `[image ${part.image.name}]` : part.file ? `[file ${part.file.name}]` : "")).join("");
}
