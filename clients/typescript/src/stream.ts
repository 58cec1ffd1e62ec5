import { setMaxListeners } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";

import { create } from "@bufbuild/protobuf";
import { Code } from "@connectrpc/connect";

import { EngineError } from "./errors.js";
import { Lost, lostBy } from "./lost.js";
import type { Reconnect } from "./reconnect.js";
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
// - "Nobody listens there" at the very first attempt fails at once: waiting would not help who has mistyped. A client
//   that has reached its engine before waits: the address is right, and the engine restarts. `startMs` bounds both.
// - What the program's own token or interceptor throws is no loss of a start, only of a stream that was there already.

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
const LONGEST_TIMER_MS = 2 ** 31 - 1; // Node takes a longer one for 1 ms

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
  readonly #signal = this.#closing.signal;
  readonly #unlink: () => void;
  #call: Call | undefined;
  #iterated = false;
  /** There has been an engine at this place. */
  #reached: boolean;
  #seen: number;
  #accepted = false;
  #ended = false;
  #closed = false;
  #stalled = false;
  /** An attach is open and has brought no message yet. */
  #refusable = false;
  #attempts = 0;
  #troubleSince: number | undefined;

  /** @internal */
  constructor(
    open: OpenCall, start: Start, reconnect: Reconnect, reached: boolean, place: string, signals: AbortSignal[],
  ) {
    this.#open = open;
    this.#reached = reached;
    this.#start = start;
    this.#reconnect = reconnect;
    this.#place = place;
    this.#oneSegment = start.rpc !== "attach";
    this.#unlink = link(signals, (reason) => {
      this.#closing.abort(reason);
      this.#hangUp();
    });
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
        this.#reached ||= lost.connected;
        if (!this.#mayRepeat(lost)) throw lost.error;
        await this.#pause(lost);
      }
    }
  }

  /** Ends the call at once; the run goes on. Whoever still reads sees the end of the stream. */
  close(): void {
    this.#closed = this.#ended = true;
    this.#unlink();
    this.#closing.abort();
    this.#hangUp();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }

  [Symbol.asyncIterator](): AsyncGenerator<EngineEvent, void, undefined> {
    if (this.#iterated) {
      throw new TypeError("a stream is read once; attach with its runId and lastSeq goes on after it");
    }
    this.#iterated = true;
    const events = this.#events();
    const leave = events.return.bind(events);
    // A generator that has not begun, or waits for an event, would not hear of it.
    events.return = (value) => {
      this.close();
      return leave(value);
    };
    return events;
  }

  async *#events(): AsyncGenerator<EngineEvent, void, undefined> {
    try {
      while (!this.#ended) {
        for (const event of await this.#next()) {
          if (this.#signal.aborted) break;
          this.lastSeq = Math.max(this.lastSeq, event.seq);
          yield event;
        }
        if (this.#signal.aborted) this.#leave();
      }
      await this.#awaitStatus();
    } finally {
      this.close();
    }
  }

  /** Ends what the signal has aborted: with its reason, or in silence after close. */
  #leave(): void {
    if (!this.#closed) this.#signal.throwIfAborted();
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
    return lost.again && (lost.connected || this.#patience() > 0);
  }

  /** How long a start waits while nobody answers. */
  #patience(): number {
    return this.#reconnect.startMs ?? (this.#reached ? this.#reconnect.totalMs : 0);
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
    if (this.#signal.aborted) hangUp.abort(this.#signal.reason);
    let named = false;
    const headers = deferred();
    const messages = this.#open(start, hangUp.signal, (found) => {
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
    delay = Math.min(delay, LONGEST_TIMER_MS);
    const limit = this.#accepted || lost.connected ? totalMs : this.#patience();
    if (now + delay - this.#troubleSince >= limit) {
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
    const late = new AbortController();
    const rest = this.#receive().catch(() => undefined);
    const timeout = sleep(STATUS_WAIT_MS, undefined, { signal: late.signal, ref: false }).catch(() => undefined);
    await Promise.race([rest, timeout]);
    late.abort();
  }

  #position(): string {
    return `run ${this.runId || "unknown"}, after event ${this.#seen}`;
  }

  #hangUp(): void {
    this.#call?.hangUp.abort();
    this.#call = undefined;
  }
}

/** Calls `leave` when one of the signals is aborted. Returns what ends that: a signal may outlive many streams. */
function link(signals: AbortSignal[], leave: (reason: unknown) => void): () => void {
  const links = signals.map((signal) => ({ signal, heard: () => leave(signal.reason) }));
  for (const { signal, heard } of links) {
    setMaxListeners(0, signal); // any number of streams may hang on one signal; that is no leak to warn of
    signal.addEventListener("abort", heard, { once: true });
  }
  return () => {
    for (const { signal, heard } of links) signal.removeEventListener("abort", heard);
  };
}

/** Promise.withResolvers, which Node 20 lacks. */
function deferred(): { promise: Promise<unknown>; resolve: (value: unknown) => void } {
  let resolve!: (value: unknown) => void;
  const promise = new Promise<unknown>((done) => (resolve = done));
  return { promise, resolve };
}
