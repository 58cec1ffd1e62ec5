import { hasContent } from "./wire.js";
import { Severity, type Diagnosis, type EngineEvent, type InterruptItem } from "./v1.js";

/** White space as the contract means it: Unicode's, and the four separators U+001C to U+001F. */
const SPACES = /[\t-\r\u001c-\u0020\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/u;
const TRAILING = new RegExp(`${SPACES.source}$`, "u");
const LINE_ENDS = /\r\n|[\n-\r\u001c-\u001e\u0085\u2028\u2029]/u;

/** Returns what a channel without structure shows of an event; "" when that is nothing. */
export function toText({ payload }: EngineEvent): string {
  switch (payload.case) {
    case "delta":
    case "reasoning":
    case "done":
    case "rewind":
      return payload.value.content;
    case "step": {
      const diagnosis = payload.value.step?.diagnosis;
      const loud = diagnosis?.severity === Severity.WARNING || diagnosis?.severity === Severity.ERROR;
      return loud ? diagnosisText(diagnosis) : "";
    }
    case "error":
      return diagnosisText(payload.value.diagnosis) || `❌ ${payload.value.message}`.replace(TRAILING, "");
    case "interrupt":
      return payload.value.items.map(questionText).join("\n");
    default:
      return "";
  }
}

/**
 * Returns a diagnosis for people: an icon and the summary, then detail and hint on lines of their own. A severity newer
 * than this package shows as info, a missing summary as the code; "" when nothing is there.
 */
export function diagnosisText(diagnosis: Diagnosis | undefined): string {
  if (!hasContent(diagnosis)) return "";
  const icon = { [Severity.WARNING as number]: "⚠️", [Severity.ERROR as number]: "❌" }[diagnosis.severity] ?? "ℹ️";
  const pieces = diagnosis.summary.split(LINE_ENDS);
  if (pieces.at(-1) === "") pieces.pop(); // a final line end begins no line
  const lines = [`${icon} ${pieces.join(" ") || diagnosis.code}`.replace(TRAILING, "")];
  if (diagnosis.detail) lines.push(diagnosis.detail);
  if (diagnosis.hint) lines.push(`建议：${diagnosis.hint}`);
  return lines.join("\n");
}

function questionText(item: InterruptItem): string {
  return item.prompt.split(SPACES).filter((word) => word !== "").join(" ") || item.toolName || item.id;
}
