import { setTimeout as sleep } from "node:timers/promises";

import { create } from "@bufbuild/protobuf";
import { Code } from "@connectrpc/connect";

import { EngineError, judge } from "./errors.js";
import {
  AttachRequestSchema,
  type AttachRequest, type EngineEvent, type ResumeRequest, type RunRequest,
} from "./v1.js";

// Rules of a stream, and their reasons
//
// - Every event comes once and in order. What was seen already is skipped; what was left out counts as a loss.
// - A start whose answer got lost is sent again with its request_id; once an event was seen, Attach goes on after it.
// - The engine's own refusal is final. Of an attach, those are not that pass by themselves.
// - Trouble ends by progress. Without a new event for `reconnect.totalMs` the stream fails.
// - "Nobody listens there" at the very first attempt fails at once: waiting would not help who has mistyped.

/** How a lost stream is taken up again; all in milliseconds. */
export interface Reconnect {
  /** Longest time without a new event before the stream fails; 0: never reconnect. */
  totalMs: number;
  /** Wait before the second attempt, doubled each time and spread by chance; the first one is made at once. */
  firstMs: number;
  /** Longest wait between two attempts. */
  longestMs: number;
}

export const RECONNECT: Readonly<Reconnect> = { totalMs: 60_000, firstMs: 100, longestMs: 3_000 };

/** What a stream begins with. */
export type Start =
  | { rpc: "run"; request: RunRequest }
  | { rpc: "resume"; request: ResumeRequest }
  | { rpc: "attach"; request: AttachRequest };

interface Message {
  events: EngineEvent[];
}
type Messages = AsyncIterator<Message>;

interface Call {
  messages: Messages;
  hangUp: AbortController;
  /** What was read while the call was opened. */
  first: Promise<IteratorResult<Message>> | undefined;
}

/** Opens one call; `onHeader` is told the engine's headers. Aborting the signal ends the call. */
export type OpenCall = (start: Start, signal: AbortSignal, onHeader: (headers: Headers) => void) => Messages;

const RUN_ID = "dualclaw-run-id";
const CONVERSATION_ID = "dualclaw-conversation-id";
const START_TIMEOUT_MS = 30_000;
const HEADERLESS_WAIT_MS = 1_000;
const STATUS_WAIT_MS = 500;

const START_LOST = new Set([Code.Unavailable, Code.Internal, Code.Canceled, Code.Unknown]);
const ATTACH_LOST = new Set([...START_LOST, Code.Aborted, Code.ResourceExhausted, Code.DeadlineExceeded]);
const ATTACH_LATER = new Set(["STORE_UNAVAILABLE", "OVERLOADED", "QUOTA_EXCEEDED", "SLOW_CLIENT"]);
const NO_CONNECTION = new Set(["ECONNREFUSED", "ENOTFOUND", "EAI_AGAIN", "EHOSTUNREACH", "ENETUNREACH", "ENOENT"]);

/** A call that ended without OK; what is done about it depends on when. */
class Lost extends Error {
  constructor(
    readonly error: EngineError,
    /** The transport failed, so a start may be sent again. */
    readonly again: boolean,
    /** An attach may be tried again. */
    readonly attach: boolean,
    readonly connected = true,
  ) {
    super(error.message);
  }
}

function lostBy(thrown: unknown, place: string): Lost {
  if (thrown instanceof Lost) return thrown;
  const { error, own } = judge(thrown);
  if (own) return new Lost(error, false, ATTACH_LATER.has(error.reason));
  const connected = !NO_CONNECTION.has(causeCode(thrown));
  let said = error;
  if (START_LOST.has(error.code)) {
    const text = connected
      ? `the connection to the engine at ${place} broke: ${error.message}`
      : `no engine answers at ${place}: ${error.message}`;
    said = new EngineError("STORE_UNAVAILABLE", text, { code: error.code, unreachable: true, cause: thrown });
  } else if (error.code === Code.Unimplemented) {
    const text = `what answers at ${place} is no dualclaw engine, or one of another version: ${error.message}`;
    said = new EngineError("INTERNAL", text, { code: error.code, cause: thrown });
  }
  return new Lost(said, START_LOST.has(error.code), ATTACH_LOST.has(error.code), connected);
}

function causeCode(thrown: unknown): string {
  for (let at = thrown; at instanceof Error; at = at.cause) {
    if ("code" in at && typeof at.code === "string") return at.code;
  }
  return "";
}

/**
 * The events of a run or segment, each once and in order, over lost connections. Iterate it once; leaving the loop, or
 * `close`, ends the call at once, never the run.
 */
export class RunStream implements AsyncIterable<EngineEvent>, AsyncDisposable {
  /** Id of the run. */
  runId: string;
  /** Id of its conversation; "" when the engine has not said it. */
  conversationId: string;
  /** Position of the newest event handed out; keep it to attach later. */
  lastSeq: number;
  /** How often the stream was lost and taken up again. */
  reconnects = 0;

  readonly #open: OpenCall;
  readonly #start: Start;
  readonly #reconnect: Reconnect;
  readonly #place: string;
  readonly #oneSegment: boolean;
  readonly #closing = new AbortController();
  readonly #signal: AbortSignal;
  #call: Call | undefined;
  #seen: number;
  #accepted = false;
  #ended = false;
  #stalled = false;
  /** An attach is open and has brought no message yet. */
  #refusable = false;
  #attempts = 0;
  #troubleSince: number | undefined;

  /** @internal */
  constructor(open: OpenCall, start: Start, reconnect: Reconnect, place: string, signal: AbortSignal | undefined) {
    this.#open = open;
    this.#start = start;
    this.#reconnect = reconnect;
    this.#place = place;
    this.#oneSegment = start.rpc !== "attach";
    this.#signal = signal ? AbortSignal.any([signal, this.#closing.signal]) : this.#closing.signal;
    this.runId = start.rpc === "run" ? "" : start.request.runId;
    this.conversationId = start.rpc === "run" ? start.request.conversationId : "";
    this.lastSeq = this.#seen = start.rpc === "attach" ? start.request.afterSeq : 0;
  }

  /** @internal Opens the first call; throws when the engine refuses it. */
  async connect(): Promise<void> {
    for (;;) {
      try {
        await this.#openCall();
        if (this.#accepted) this.reconnects += 1;
        this.#accepted = true;
        return;
      } catch (thrown) {
        this.#hangUp();
        this.#signal.throwIfAborted();
        const lost = lostBy(thrown, this.#place);
        if (!this.#mayRepeat(lost)) throw lost.error;
        await this.#pause(lost);
      }
    }
  }

  /** Ends the call at once; the run goes on. Whoever still reads sees the end of the stream. */
  close(): void {
    this.#ended = true;
    this.#closing.abort();
    this.#hangUp();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<EngineEvent, void, undefined> {
    try {
      while (!this.#ended) {
        for (const event of await this.#next()) {
          this.lastSeq = Math.max(this.lastSeq, event.seq);
          yield event;
        }
      }
      await this.#awaitStatus();
    } finally {
      this.close();
    }
  }

  /** Reads one message, or takes up a lost stream; returns what is new of it. */
  async #next(): Promise<EngineEvent[]> {
    try {
      if (!this.#call) await this.connect();
      return this.#take(await this.#receive());
    } catch (thrown) {
      this.#hangUp();
      if (this.#ended) return [];
      this.#signal.throwIfAborted();
      if (thrown instanceof EngineError) throw thrown; // connect has tried everything
      const lost = lostBy(thrown, this.#place);
      if (this.#refusable && !lost.attach) throw lost.error;
      await this.#pause(lost);
      return [];
    }
  }

  #receive(): Promise<IteratorResult<Message>> {
    const call = this.#call!;
    const first = call.first;
    call.first = undefined;
    return first ?? call.messages.next();
  }

  #take(message: IteratorResult<Message>): EngineEvent[] {
    this.#refusable = false;
    if (message.done) {
      if (this.#oneSegment) this.#stall("the engine ended the stream before the end of the segment");
      this.#ended = true;
      return [];
    }
    const fresh: EngineEvent[] = [];
    for (const event of message.value.events) {
      if (event.seq > 0 && event.seq <= this.#seen) continue;
      if (event.seq > this.#seen + 1 && (this.#seen > 0 || !this.#oneSegment)) {
        if (fresh.length === 0) this.#stall(`the engine left out event ${this.#seen + 1}`);
        this.#hangUp(); // what came before the gap is good; after it the next read attaches
        break;
      }
      fresh.push(event);
      this.#seen = Math.max(this.#seen, event.seq);
      if (this.#oneSegment && (event.payload.case === "done" || event.payload.case === "error")) {
        this.#ended = true;
        break;
      }
    }
    if (fresh.length > 0) {
      this.#attempts = 0;
      this.#troubleSince = undefined;
      this.#stalled = false;
    }
    return fresh;
  }

  /** Counts a stream that the engine spoilt as lost, once; spoilt again at the same place it fails. */
  #stall(problem: string): never {
    const error = new EngineError("INTERNAL", `${problem} (${this.#position()})`, { code: Code.Internal });
    if (this.#stalled) throw error;
    this.#stalled = true;
    throw new Lost(error, true, true);
  }

  #mayRepeat(lost: Lost): boolean {
    if (this.#accepted) return lost.attach;
    return lost.again && (lost.connected || this.#troubleSince !== undefined);
  }

  async #openCall(): Promise<void> {
    let start = this.#start;
    if (this.#accepted && (this.#seen > 0 || !this.#oneSegment)) {
      const wait = start.rpc === "attach" && start.request.wait;
      const request = create(AttachRequestSchema, { runId: this.runId, afterSeq: this.#seen, wait });
      start = { rpc: "attach", request };
    }
    this.#refusable = start.rpc === "attach";
    const hangUp = new AbortController();
    const signal = AbortSignal.any([this.#signal, hangUp.signal]);
    let named = false;
    const headers = deferred();
    const messages = this.#open(start, signal, (found) => {
      const runId = found.get(RUN_ID);
      if (!runId) return;
      this.runId = runId;
      this.conversationId = found.get(CONVERSATION_ID) || this.conversationId;
      named = true;
      headers.resolve(undefined);
    });
    const first = messages.next();
    first.catch(() => undefined); // whoever waits for it sees it; nobody may wait any more
    this.#call = { messages, hangUp, first };
    // Without a run id in the headers: a refusal, or a foreign engine. The first message or the status tells which; an
    // attach to a silent run may bring neither for a long time, so of that nobody waits long.
    const patience = this.#oneSegment ? START_TIMEOUT_MS : HEADERLESS_WAIT_MS;
    const late = new AbortController();
    const timeout = sleep(patience, "late", { signal: late.signal, ref: false }).catch(() => "over");
    try {
      const won = await Promise.race([first, headers.promise, timeout]);
      if (named) return;
      if (won === "late") {
        if (!this.#oneSegment) return;
        const text = `the engine at ${this.#place} did not answer within ${START_TIMEOUT_MS / 1000} s`;
        const error = new EngineError("STORE_UNAVAILABLE", text, { code: Code.Unavailable, unreachable: true });
        throw new Lost(error, true, true);
      }
      const message = won as IteratorResult<Message>;
      if (!message.done) this.runId = message.value.events[0]?.runId || this.runId;
    } finally {
      late.abort();
    }
  }

  /** Waits before the next attempt; throws when there is none left. */
  async #pause(lost: Lost): Promise<void> {
    const now = performance.now();
    this.#troubleSince ??= now;
    const { totalMs, firstMs, longestMs } = this.#reconnect;
    let delay = 0;
    if (this.#attempts > 0) {
      delay = Math.min(longestMs, firstMs * 2 ** Math.min(this.#attempts - 1, 30)) * (0.5 + Math.random());
      delay = Math.max(delay, lost.error.retryAfterMs ?? 0);
    }
    this.#attempts += 1;
    if (now + delay - this.#troubleSince >= totalMs) {
      if (!this.#accepted) throw lost.error;
      const text = `the stream was lost and not taken up again within ${totalMs / 1000} s (${this.#position()})`;
      const details = { code: Code.Unavailable, unreachable: true, cause: lost.error };
      throw new EngineError("STORE_UNAVAILABLE", `${text}; last: ${lost.error.message}`, details);
    }
    await sleep(delay, undefined, { signal: this.#signal }).catch(() => undefined);
    if (!this.#ended) this.#signal.throwIfAborted();
  }

  /** Lets the call end by itself after its last event, so that both sides record OK and no cancellation. */
  async #awaitStatus(): Promise<void> {
    if (!this.#call) return;
    const rest = this.#receive().catch(() => undefined);
    await Promise.race([rest, sleep(STATUS_WAIT_MS, undefined, { ref: false })]);
  }

  #position(): string {
    return `run ${this.runId || "unknown"}, after event ${this.#seen}`;
  }

  #hangUp(): void {
    this.#call?.hangUp.abort();
    this.#call = undefined;
  }
}

/** Promise.withResolvers, which Node 20 lacks. */
function deferred(): { promise: Promise<unknown>; resolve: (value: unknown) => void } {
  let resolve!: (value: unknown) => void;
  const promise = new Promise<unknown>((done) => (resolve = done));
  return { promise, resolve };
}
