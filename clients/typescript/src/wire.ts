import type { Timestamp } from "@bufbuild/protobuf/wkt";

import { canonicalArgs, quote } from "./args.js";
import {
  DecisionAction, InterruptKind, Phase, Severity, StepKind,
  type Diagnosis, type Done, type EngineEvent, type InterruptItem, type Step,
} from "./v1.js";

/** Names of the wire format; what is not here has no name on it. */
const KINDS = new Map([
  [StepKind.THINKING, "thinking"], [StepKind.SKILL, "skill"], [StepKind.MCP, "mcp"],
  [StepKind.AGENT, "agent"], [StepKind.KB, "kb"], [StepKind.MEDIA, "media"],
]);
const PHASES = new Map([[Phase.START, "start"], [Phase.OK, "ok"], [Phase.FAIL, "fail"]]);
const SEVERITIES = new Map([[Severity.INFO, "info"], [Severity.WARNING, "warning"], [Severity.ERROR, "error"]]);
const INTERRUPTS = new Map([[InterruptKind.APPROVAL, "approval"], [InterruptKind.QUESTION, "question"]]);
const ACTIONS = new Map([
  [DecisionAction.APPROVE, "approve"], [DecisionAction.REJECT, "reject"], [DecisionAction.EDIT, "edit"],
  [DecisionAction.SKIP, "skip"], [DecisionAction.RESPOND, "respond"],
]);

/** Members of an object, as JSON text, in the order of the wire. */
type Members = [key: string, json: string][];

/**
 * Returns the wire form of an event: the JSON text of the contract, byte for byte what every other language writes.
 * Undefined for an event that has none: its payload, or the kind of its step, is unset or newer than this package.
 */
export function toWire(event: EngineEvent): string | undefined {
  const members = payload(event);
  if (!members) return undefined;
  if (event.seq > 0) members.push(["seq", String(event.seq)]);
  ifAny(members, "trace_id", event.traceId);
  ifAny(members, "tenant_id", event.tenantId);
  ifAny(members, "claw", event.claw);
  ifAny(members, "run_id", event.runId);
  return object(members);
}

/** Returns the SSE frame around a wire text. */
export function frame(wire: string): string {
  return `data: ${wire}\n\n`;
}

/**
 * Returns the frame of the original SSE route for an event by itself: thinned of its envelope, but with the trace_id on
 * done and error. Undefined for what that route does not carry.
 */
export function originalFrame(event: EngineEvent): string | undefined {
  const kind = event.payload.case;
  if (kind === "interrupt" || kind === "rewind") return undefined;
  const members = payload(event);
  if (!members) return undefined;
  if (kind === "done" || kind === "error") ifAny(members, "trace_id", event.traceId);
  return frame(object(members));
}

/** Tells whether anything of a diagnosis would show on the wire. */
export function hasContent(diagnosis: Diagnosis | undefined): diagnosis is Diagnosis {
  return diagnosis !== undefined && (
    diagnosis.code !== "" || SEVERITIES.has(diagnosis.severity) || diagnosis.summary !== "" ||
    diagnosis.detail !== "" || diagnosis.hint !== "" || diagnosis.retryable
  );
}

function payload({ payload }: EngineEvent): Members | undefined {
  switch (payload.case) {
    case "delta":
    case "reasoning":
      return [["type", quote(payload.case)], ["content", quote(payload.value.content)]];
    case "step": {
      const { step, index } = payload.value;
      if (!step || !KINDS.has(step.kind)) return undefined;
      const members: Members = [["type", quote("step")], ["step", stepText(step)]];
      if (index !== undefined && index >= 0) members.push(["index", String(index)]);
      return members;
    }
    case "done":
      return done(payload.value);
    case "error": {
      const members: Members = [["type", quote("error")], ["message", quote(payload.value.message)]];
      diagnosed(members, payload.value.diagnosis);
      return members;
    }
    case "interrupt":
      return [["type", quote("interrupt")], ["items", `[${payload.value.items.map(item).join(", ")}]`]];
    case "rewind": {
      const { content, reasoning, reason, attempt } = payload.value;
      const members: Members = [["type", quote("rewind")], ["content", quote(content)]];
      ifAny(members, "reasoning", reasoning);
      ifAny(members, "reason", reason);
      if (attempt > 0) members.push(["attempt", String(attempt)]);
      return members;
    }
    default:
      return undefined;
  }
}

function stepText(step: Step): string {
  const kind = KINDS.get(step.kind)!;
  const members: Members = [["type", quote(kind)]];
  if (kind === "thinking") {
    members.push(["text", quote(step.text)]);
  } else {
    if (kind === "mcp") members.push(["server", quote(step.server)]);
    members.push(
      ["name", quote(step.name)], ["args", canonicalArgs(step.argsJson)], ["result", quote(step.result)],
    );
  }
  diagnosed(members, step.diagnosis);
  ifAny(members, "phase", PHASES.get(step.phase));
  const { node } = step;
  if (node && (node.id || node.type || node.label)) {
    members.push(["node", object([["id", quote(node.id)], ["type", quote(node.type)], ["label", quote(node.label)]])]);
  }
  return object(members);
}

function done(done: Done): Members {
  const steps = done.processSteps.filter((step) => KINDS.has(step.kind)); // a newer kind is left out, never the done
  return [
    ["type", quote("done")], ["message_id", quote(done.messageId)], ["conversation_id", quote(done.conversationId)],
    ["content", quote(done.content)], ["process_steps", `[${steps.map(stepText).join(", ")}]`],
    ["used_skills", texts(done.usedSkills)], ["used_mcp", texts(done.usedMcp)],
    ["generating", String(done.generating)],
  ];
}

function item(item: InterruptItem): string {
  const members: Members = [["id", quote(item.id)], ["kind", quote(INTERRUPTS.get(item.kind) ?? "")]];
  ifAny(members, "tool_name", item.toolName);
  ifObject(members, "args", item.argsJson);
  ifAny(members, "prompt", item.prompt);
  const actions = item.allowedActions.map((action) => ACTIONS.get(action)).filter((name) => name !== undefined);
  if (actions.length > 0) members.push(["allowed_actions", texts(actions)]);
  ifObject(members, "response_schema", item.responseSchemaJson);
  if (item.path.length > 0) members.push(["path", texts(item.path)]);
  ifAny(members, "args_hash", item.argsHash);
  ifAny(members, "expire_time", timeText(item.expireTime));
  return object(members);
}

function diagnosed(members: Members, diagnosis: Diagnosis | undefined): void {
  if (!hasContent(diagnosis)) return;
  members.push(["diagnosis", object([
    ["code", quote(diagnosis.code)], ["severity", quote(SEVERITIES.get(diagnosis.severity) ?? "")],
    ["summary", quote(diagnosis.summary)], ["detail", quote(diagnosis.detail)], ["hint", quote(diagnosis.hint)],
    ["retryable", String(diagnosis.retryable)],
  ])]);
}

function object(members: Members): string {
  return `{${members.map(([key, json]) => `"${key}": ${json}`).join(", ")}}`;
}

function texts(values: string[]): string {
  return `[${values.map(quote).join(", ")}]`;
}

function ifAny(members: Members, key: string, text: string | undefined): void {
  if (text) members.push([key, quote(text)]);
}

function ifObject(members: Members, key: string, json: string): void {
  const found = canonicalArgs(json);
  if (found !== "{}") members.push([key, found]);
}

const FIRST_SECOND = -62135596800n;
const LAST_SECOND = 253402300799n;

/** Prints a time as RFC 3339 with as many groups of three digits as it needs; nothing when out of range. */
function timeText(moment: Timestamp | undefined): string {
  if (!moment || moment.seconds < FIRST_SECOND || moment.seconds > LAST_SECOND) return "";
  if (moment.nanos < 0 || moment.nanos > 999_999_999) return "";
  const whole = new Date(Number(moment.seconds) * 1000).toISOString().slice(0, 19);
  const fraction = String(moment.nanos).padStart(9, "0").replace(/(000)+$/, "");
  return `${whole}${fraction && `.${fraction}`}Z`;
}
