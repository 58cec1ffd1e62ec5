// The timeline of a run's steps: one row each, replaced whole by the last event of its index.
//
// Rules
// - A row that says the same is left alone; one that is drawn anew keeps whether it was open, and its focus.
// - Steps of a sub-agent stand below the step that called it. Frames do not name that step, but ids of nodes are paths
//   ("lead/tool/search/searcher/tool/find" is below "lead/tool/search"), which say the same unless one sub-agent is
//   called several times at once: then its steps stand below the call that began last.
// - Names, arguments and results are foreign text: characters that would hide or reorder others are spelt out.

import { make, spellOut } from "./markdown.js";

const KINDS = { skill: "Skill", mcp: "MCP", agent: "Agent", kb: "Knowledge", media: "Media", thinking: "" };
const MARKS = {
  ok: "M3.5 8.5 6.5 11.5 12.5 4.5",
  fail: "M4 4l8 8M12 4l-8 8",
  held: "M6 4v8M10 4v8",
  thinking: "M4 8h.01M8 8h.01M12 8h.01",
};
const STATES = { start: "running", ok: "done", fail: "failed", held: "waiting for an answer", thinking: "" };
const WAITING = ["approval.required", "input.required"];

export class Timeline {
  constructor() {
    this.rows = new Map();   // place -> { step, node, drawn, open, inner, parent }
    this.loose = 0;          // steps without an index get places of their own
    this.element = make("ol", "steps");
    this.element.setAttribute("aria-label", "Steps");
  }

  // Returns true if the row is new. `open`: whether it is to be shown unfolded then.
  set(index, step, open = false) {
    const place = index === undefined ? `loose${this.loose++}` : index;
    const row = this.rows.get(place);
    if (row) {
      // The end of a run tells all steps once more; a row that says the same is left alone, with its focus.
      if (JSON.stringify(row.step) !== JSON.stringify(step)) row.step = step;
      return false;
    }
    this.rows.set(place, { step, node: null, drawn: null, open, inner: null, parent: this.parentOf(step) });
    return true;
  }

  parentOf({ node }) {
    let found = null;
    for (const row of node ? this.rows.values() : []) {
      const above = row.step.node;
      if (!above || !node.id.startsWith(`${above.id}/`)) continue;
      if (found && above.id.length < found.step.node.id.length) continue;
      if (found && above.id === found.step.node.id && row.step.phase !== "start") continue;
      found = row;
    }
    return found;
  }

  get busy() {
    return [...this.rows.values()].some((row) => row.step.phase === "start");
  }

  draw() {
    for (const row of this.rows.values()) if (row.drawn !== row.step) drawRow(row, this.element);
  }
}

export function isWaiting(step) {
  return Boolean(step.diagnosis) && WAITING.includes(step.diagnosis.code) && step.phase !== "ok" && step.phase !== "fail";
}

function drawRow(row, list) {
  const { step } = row;
  const held = isWaiting(step);
  const state = step.type === "thinking" ? "thinking" : held ? "held" : step.phase || "ok";
  const old = row.node && row.node.querySelector("details");
  const hadFocus = Boolean(old) && old.contains(document.activeElement);
  const item = make("li", state);
  item.append(mark(state));
  const details = make("details", "step");
  const title = make("summary");
  if (KINDS[step.type]) title.append(make("span", "kind", step.server ? `${KINDS[step.type]} ${step.server}` : KINDS[step.type]));
  const name = make("span", "title");
  title.append(spellOut(name, step.type === "thinking" ? "Thought" : step.name || step.type));
  if (STATES[state]) title.append(make("span", "state", `, ${STATES[state]}`));
  details.append(title);
  if (step.type === "thinking") {
    title.append(make("span", "brief", firstLine(step.text)));
    details.append(make("div", "thought", step.text));
  } else {
    const args = Object.keys(step.args || {}).length ? step.args : null;
    if (args) title.append(spellOut(make("span", "brief"), brief(args)));
    const body = make("dl");
    if (args) body.append(entry("Arguments", JSON.stringify(args, null, 2)));
    if (step.result && !saysTheSame(step.result, step.diagnosis)) body.append(entry("Result", pretty(step.result)));
    if (!body.children.length) body.append(entry(state === "start" ? "Running" : "No arguments, no result", ""));
    details.append(body);
  }
  details.open = old ? old.open : row.open;
  item.append(details);
  if (step.diagnosis && step.diagnosis.summary && !held) item.append(finding(step.diagnosis));   // a card says it better
  if (row.inner) item.append(row.inner);
  if (row.node) row.node.replaceWith(item);
  else listBelow(row.parent, list).append(item);
  if (hadFocus) title.focus({ preventScroll: true });
  row.node = item;
  row.drawn = step;
}

function listBelow(parent, list) {
  if (!parent) return list;
  if (!parent.inner) {
    parent.inner = make("ol", "steps inner");
    parent.inner.setAttribute("aria-label", `Steps of ${parent.step.name}`);
    parent.node.append(parent.inner);
  }
  return parent.inner;
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
    value.append(spellOut(make("pre"), text));
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
