// The view of one answer: it takes events and keeps text, reasoning and the timeline of steps up to date.
//
// Events change plain state at once; the page is drawn at most once per animation frame, however many arrive.

import { Cards } from "./cards.js";
import { make, renderInto } from "./markdown.js";
import { parseJson } from "./stream.js";

const KINDS = { skill: "Skill", mcp: "MCP", agent: "Agent", kb: "Knowledge", media: "Media", thinking: "" };
const MARKS = {
  ok: "M3.5 8.5 6.5 11.5 12.5 4.5",
  fail: "M4 4l8 8M12 4l-8 8",
  held: "M6 4v8M10 4v8",
  thinking: "M4 8h.01M8 8h.01M12 8h.01",
};
const STATES = { start: "running", ok: "done", fail: "failed", held: "waiting for an answer", thinking: "" };
const ENDINGS = {
  STEP_LIMIT: "Step limit reached", BUDGET_EXCEEDED: "Budget used up", LOOP_DETECTED: "Stopped: it went in circles",
  REJECTED: "Ended after a refusal", CANCELLED: "Stopped",
};

export class Turn {
  constructor(onDraw = () => {}) {
    this.onDraw = onDraw;
    this.text = "";
    this.shown = "";          // text that a rewind took back, kept on the page until the new text differs
    this.reasoning = "";
    this.told = 0;            // how much of the reasoning the timeline already has as thinking steps
    this.rows = new Map();    // index -> { step, node, drawn }
    this.loose = 0;           // steps without an index get places of their own
    this.live = false;
    this.parked = false;      // it waits for people
    this.over = false;        // a segment has ended, and no later one has begun
    this.frame = 0;
    this.element = make("article", "turn");
    this.element.setAttribute("aria-label", "Answer");
    this.steps = make("ol", "steps");
    this.steps.setAttribute("aria-label", "Steps");
    this.thought = make("details", "reasoning");
    this.thoughtTitle = make("summary", "", "Thinking");
    this.thoughtBody = make("div", "thought");
    this.thought.append(this.thoughtTitle, this.thoughtBody);
    this.answer = make("div", "answer");
    this.answer.setAttribute("aria-live", "polite");
    this.waiting = make("p", "waiting", "Working");
    this.notes = make("div", "notes");
    this.cards = new Cards();
    this.foot = make("p", "foot");
    this.element.append(this.steps, this.thought, this.answer, this.waiting, this.notes, this.cards.element, this.foot);
    this.draw();
  }

  // A live turn is being written. While it is, screen readers wait; they read the answer when it is complete.
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
        break;
      case "rewind":
        if (this.text.length > event.content.length) this.shown = this.text;
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
    }
    this.text = this.shown = this.reasoning = "";
    this.told = 0;
  }

  setStep(index, step) {
    const place = index === undefined ? `loose${this.loose++}` : index;
    const row = this.rows.get(place);
    if (row) {
      // The end of a run tells all steps once more; a row that says the same is left alone, with its focus.
      if (JSON.stringify(row.step) !== JSON.stringify(step)) row.step = step;
      return;
    }
    const thinking = step.type === "thinking";
    this.rows.set(place, { step, node: null, drawn: null, open: thinking && this.thought.open });
    if (!thinking) return;
    // What was read while it came in moves into the timeline, and stays open there if it was.
    this.told = this.reasoning.length;
    this.thought.open = false;
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
    if (this.shown && !(this.shown.length > this.text.length && this.shown.startsWith(this.text))) this.shown = "";
    renderInto(this.answer, this.shown || this.text);
    this.answer.classList.toggle("rewriting", Boolean(this.shown));
    this.answer.setAttribute("aria-busy", String(this.live));   // not before the last piece can be read
    const thinking = this.reasoning.slice(this.told);
    this.thought.hidden = !thinking;
    if (this.thoughtBody.textContent !== thinking) this.thoughtBody.textContent = thinking;
    for (const row of this.rows.values()) if (row.drawn !== row.step) drawRow(row, this.steps);
    this.element.classList.toggle("live", this.live && !this.parked);
    const busy = [...this.rows.values()].some((row) => row.step.phase === "start");
    this.waiting.hidden = !this.live || this.parked || busy || Boolean(this.text) || Boolean(thinking);
  }
}

function strip(diagnosis, message) {
  if (!diagnosis) return {};
  return { ...diagnosis, summary: message || diagnosis.summary, detail: diagnosis.summary === message ? diagnosis.detail : [diagnosis.summary, diagnosis.detail].filter(Boolean).join("\n") };
}

function drawRow(row, list) {
  const { step } = row;
  const held = step.diagnosis && ["approval.required", "input.required"].includes(step.diagnosis.code) && step.phase !== "ok" && step.phase !== "fail";
  const state = step.type === "thinking" ? "thinking" : held ? "held" : step.phase || "ok";
  const wasOpen = row.node ? row.node.querySelector("details").open : row.open;
  const hadFocus = row.node !== null && row.node.contains(document.activeElement);
  const item = make("li", state);
  item.append(mark(state));
  const details = make("details", "step");
  const title = make("summary");
  if (KINDS[step.type]) title.append(make("span", "kind", step.server ? `${KINDS[step.type]} ${step.server}` : KINDS[step.type]));
  title.append(make("span", "title", step.type === "thinking" ? "Thought" : step.name || step.type));
  if (STATES[state]) title.append(make("span", "state", `, ${STATES[state]}`));
  details.append(title);
  if (step.type === "thinking") {
    title.append(make("span", "brief", firstLine(step.text)));
    details.append(make("div", "thought", step.text));
  } else {
    const args = Object.keys(step.args || {}).length ? step.args : null;
    if (args) title.append(make("span", "brief", brief(args)));
    const body = make("dl");
    if (args) body.append(entry("Arguments", JSON.stringify(args, null, 2)));
    if (step.result && !saysTheSame(step.result, step.diagnosis)) body.append(entry("Result", pretty(step.result)));
    if (!body.children.length) body.append(entry(state === "start" ? "Running" : "No arguments, no result", ""));
    details.append(body);
  }
  details.open = wasOpen;
  item.append(details);
  if (step.diagnosis && step.diagnosis.summary && !held) item.append(finding(step.diagnosis));   // a card says it better
  if (row.node) row.node.replaceWith(item);
  else list.append(item);
  if (hadFocus) title.focus({ preventScroll: true });
  row.node = item;
  row.drawn = step;
}

// A step that failed without a result of its own has its diagnosis as result, which is shown below it anyway.
function saysTheSame(result, diagnosis) {
  if (!diagnosis) return false;
  const words = (text) => text.replace(/^[^\p{L}\p{N}]+/u, "").replace(/\s+/g, " ").trim();
  const { summary, detail, hint } = diagnosis;
  return [[summary], [summary, detail], [summary, detail, hint && `建议：${hint}`]]
    .some((lines) => words(result) === words(lines.filter(Boolean).join("\n")));
}

function mark(state) {
  const span = make("span", "mark");
  span.setAttribute("aria-hidden", "true");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", MARKS[state] || MARKS.ok);
  svg.append(path);
  span.append(svg);
  return span;
}

function entry(name, text) {
  const group = make("div");
  group.append(make("dt", "", name));
  if (text) {
    const value = make("dd");
    value.append(make("pre", "", text));
    group.append(value);
  }
  return group;
}

export function finding({ severity = "", summary = "", detail = "", hint = "" }, traceId = "") {
  const box = make("div", `finding ${["info", "warning", "error"].includes(severity) ? severity : ""}`);
  if (summary) box.append(make("strong", "", summary));
  if (detail) box.append(make("p", "", detail));
  if (hint) box.append(make("p", "", hint));
  if (traceId) box.append(make("div", "trace", `trace ${traceId}`));
  return box;
}

function firstLine(text) {
  return text.trim().split("\n")[0].slice(0, 160);
}

function brief(args) {
  return Object.entries(args).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ").slice(0, 160);
}

function pretty(text) {
  if (!/^\s*[[{]/.test(text) || /\d{16}/.test(text)) return text;   // big numbers would change in a round trip
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
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
