import { Phase, StepKind, type EngineEvent, type InterruptItem, type Step } from "./v1.js";

/** Codes of failed steps that never ran, so their tool does not count as used. */
const NOT_CARRIED_OUT = new Set([
  "tool.unknown", "tool.bad_arguments", "tool.rejected", "tool.skipped", "permission.denied",
]);

/**
 * What a run has said so far. Give it every event in order; read it at any time.
 *
 * The text of a segment is its last rewind plus later deltas; the first event after a terminal one starts it afresh.
 * Steps live as long as the run, and the last event of an index replaces earlier ones whole.
 */
export class RunView {
  /** Position of the newest event; 0 before the first. */
  lastSeq = 0;
  /** The done or error that ended the segment; undefined while it is open. */
  terminal: EngineEvent | undefined;
  /** Open questions; none again once the next segment has begun. */
  interrupts: readonly InterruptItem[] = [];
  /** The answer of the segment so far. */
  text = "";
  /** The reasoning of the segment so far. */
  reasoning = "";
  /** The steps of the run by index, in the order of their first event. */
  readonly steps = new Map<number, Step>();
  #nextIndex = 0;

  /** Takes in the next event. Returns false, and changes nothing, for a seq that was there already. */
  apply(event: EngineEvent): boolean {
    if (event.seq > 0) {
      if (event.seq <= this.lastSeq) return false;
      this.lastSeq = event.seq;
    }
    if (this.terminal) {
      this.terminal = undefined;
      this.interrupts = [];
      this.text = this.reasoning = "";
    }
    const { payload } = event;
    switch (payload.case) {
      case "delta":
        this.text += payload.value.content;
        break;
      case "reasoning":
        this.reasoning += payload.value.content;
        break;
      case "step": {
        const index = payload.value.index ?? this.#nextIndex; // an older producer says none
        if (payload.value.step) this.steps.set(index, payload.value.step);
        this.#nextIndex = Math.max(this.#nextIndex, index + 1);
        break;
      }
      case "rewind":
        this.text = payload.value.content;
        this.reasoning = payload.value.reasoning;
        break;
      case "interrupt":
        this.interrupts = payload.value.items;
        break;
      case "done":
      case "error":
        this.terminal = event;
        break;
    }
    return true;
  }

  /** The steps of the run in index order, as done lists them. */
  get processSteps(): Step[] {
    return [...this.steps].sort(([a], [b]) => a - b).map(([, step]) => step);
  }

  /** Indexes of steps that have started and not ended. */
  get openSteps(): number[] {
    return [...this.steps].filter(([, step]) => step.phase === Phase.START).map(([index]) => index);
  }

  /** Distinct names of skill steps that were carried out, in the order of their first start. */
  get usedSkills(): string[] {
    return this.#used(StepKind.SKILL);
  }

  /** Distinct names of MCP steps that were carried out, in the order of their first start. */
  get usedMcp(): string[] {
    return this.#used(StepKind.MCP);
  }

  #used(kind: StepKind): string[] {
    const steps = [...this.steps.values()].filter((step) => step.kind === kind && carriedOut(step));
    return [...new Set(steps.map((step) => step.name))];
  }
}

function carriedOut(step: Step): boolean {
  if (step.phase === Phase.FAIL) return !NOT_CARRIED_OUT.has(step.diagnosis?.code ?? "");
  return step.phase === Phase.OK;
}
