import {
  create, fromBinary, toBinary, type DescMessage, type MessageInitShape, type MessageShape,
} from "@bufbuild/protobuf";
import {
  Code, createClient, type CallOptions as ConnectCallOptions, type Client, type Interceptor,
} from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import type { SecureClientSessionOptions } from "node:http2";
import { randomBytes } from "node:crypto";

import { EngineError, judge } from "./errors.js";
import { finalError } from "./lost.js";
import { reconnectOf, type Reconnect } from "./reconnect.js";
import { RunStream, type OpenCall, type Start } from "./stream.js";
import {
  AgentService, AttachRequestSchema, ConversationService, EngineService, ListRunsRequestSchema, OperatorService,
  ResumeRequestSchema, Role, RunRequestSchema,
  type Run,
} from "./v1.js";

const MAX_MESSAGE = 64 * 1024 * 1024;
const UNARY_TIMEOUT_MS = 30_000;

export interface ClientOptions {
  /** API key or JWT, sent with every call; a function is asked for each. */
  token?: string | (() => string | Promise<string>);
  /** Tenant to act for; only the role service may. */
  tenant?: string;
  /** Person to act for; only the role service may. */
  subject?: string;
  /** TLS: true trusts the system's authorities; an object holds `ca`, `key`, `cert` and the like. */
  tls?: boolean | SecureClientSessionOptions;
  /** How lost streams are taken up again. */
  reconnect?: Partial<Reconnect>;
  /** Interceptors of connect, for tracing and the like. */
  interceptors?: Interceptor[];
}

export interface CallOptions {
  /** Aborting it ends the stream or call with its reason, never the run; AbortSignal.timeout makes a deadline. */
  signal?: AbortSignal;
}

/**
 * A connection to one engine, for any number of calls at once. It connects with the first call; one that idles keeps no
 * process alive. A program that makes many clients closes each.
 *
 * `engine`, `conversations`, `agents` and `operators` are the plain stubs of the contract; they throw ConnectError.
 */
export class EngineClient implements Disposable {
  readonly engine: Client<typeof EngineService>;
  readonly conversations: Client<typeof ConversationService>;
  readonly agents: Client<typeof AgentService>;
  readonly operators: Client<typeof OperatorService>;
  readonly #target: string;
  readonly #reconnect: Reconnect;
  readonly #sessions: Http2SessionManager;
  readonly #closing = new AbortController();
  #reached = false;

  /**
   * @param target the engine's address, HOST:PORT.
   */
  constructor(target: string, options: ClientOptions = {}) {
    const baseUrl = urlOf(target, options.tls);
    this.#target = target;
    this.#reconnect = reconnectOf(options.reconnect);
    const nodeOptions = typeof options.tls === "object" ? options.tls : {};
    this.#sessions = new Http2SessionManager(baseUrl, { pingIntervalMs: 30_000, pingTimeoutMs: 10_000 }, nodeOptions);
    const transport = createGrpcTransport({
      baseUrl,
      interceptors: [credentials(options), ...(options.interceptors ?? []), this.#watch],
      sessionManager: this.#sessions,
      readMaxBytes: MAX_MESSAGE,
      writeMaxBytes: MAX_MESSAGE,
    });
    this.engine = createClient(EngineService, transport);
    this.conversations = createClient(ConversationService, transport);
    this.agents = createClient(AgentService, transport);
    this.operators = createClient(OperatorService, transport);
  }

  /**
   * Starts a run and returns its first segment as a stream, once the engine has accepted it. Without a requestId the
   * client makes one, so that a start whose answer got lost is not started twice.
   */
  async run(request: MessageInitShape<typeof RunRequestSchema>, options?: CallOptions): Promise<RunStream> {
    const copy = copyOf(RunRequestSchema, request);
    copy.requestId ||= newRequestId();
    return this.#stream({ rpc: "run", request: copy }, options);
  }

  /** Runs a text: a new conversation with the engine's default agent. */
  ask(text: string, options?: CallOptions): Promise<RunStream> {
    return this.run({ message: userMessage(text) }, options);
  }

  /** Answers an interrupted run and returns its next segment as a stream. */
  async resume(request: MessageInitShape<typeof ResumeRequestSchema>, options?: CallOptions): Promise<RunStream> {
    const copy = copyOf(ResumeRequestSchema, request);
    copy.requestId ||= newRequestId();
    return this.#stream({ rpc: "resume", request: copy }, options);
  }

  /** Follows a run: every event after `afterSeq`, stored ones first. With `wait` it stays until the run is final. */
  async attach(request: MessageInitShape<typeof AttachRequestSchema>, options?: CallOptions): Promise<RunStream> {
    return this.#stream({ rpc: "attach", request: copyOf(AttachRequestSchema, request) }, options);
  }

  /** Asks a run to end. The answer may still say RUNNING; its stream tells the end. */
  async cancel(runId: string, reason = "", options?: CallOptions): Promise<Run> {
    const { run } = await this.#unary((bounds) => this.engine.cancel({ runId, reason }, bounds), options);
    return present(run);
  }

  /** Returns a run. */
  async getRun(runId: string, options?: CallOptions): Promise<Run> {
    const { run } = await this.#unary((bounds) => this.engine.getRun({ runId }, bounds), options);
    return present(run);
  }

  /** Yields the runs that fit the request's filters, newest first, page by page as they are asked for. */
  async *runs(
    request: MessageInitShape<typeof ListRunsRequestSchema> = {}, options?: CallOptions,
  ): AsyncGenerator<Run, void, undefined> {
    const next = copyOf(ListRunsRequestSchema, request);
    do {
      const page = await this.#unary((bounds) => this.engine.listRuns(next, bounds), options);
      yield* page.runs;
      next.pageToken = page.nextPageToken;
    } while (next.pageToken);
  }

  /** Ends the connection and every call on it; streams that are read fail with an AbortError. Runs go on. */
  close(): void {
    const reason = new DOMException("the client was closed", "AbortError");
    this.#closing.abort(reason);
    this.#sessions.abort(reason);
  }

  [Symbol.dispose](): void {
    this.close();
  }

  async #stream(start: Start, options: CallOptions | undefined): Promise<RunStream> {
    const signals = [this.#closing.signal, ...(options?.signal ? [options.signal] : [])];
    for (const signal of signals) signal.throwIfAborted();
    const stream = new RunStream(this.#open, start, this.#reconnect, this.#reached, this.#target, signals);
    try {
      await stream.connect();
    } catch (error) {
      stream.close();
      throw error;
    }
    return stream;
  }

  async #unary<T>(call: (bounds: ConnectCallOptions) => Promise<T>, options: CallOptions | undefined): Promise<T> {
    const signals = [this.#closing.signal, ...(options?.signal ? [options.signal] : [])];
    try {
      return await call({ timeoutMs: UNARY_TIMEOUT_MS, ...(options?.signal && { signal: options.signal }) });
    } catch (thrown) {
      for (const signal of signals) signal.throwIfAborted();
      throw finalError(thrown, this.#target);
    }
  }

  /** The innermost interceptor: what comes through it came from an engine. */
  readonly #watch: Interceptor = (next) => async (request) => {
    this.#closing.signal.throwIfAborted();
    try {
      const response = await next(request);
      this.#reached = true;
      return response;
    } catch (thrown) {
      this.#reached ||= judge(thrown).own;
      throw thrown;
    }
  };

  readonly #open: OpenCall = (start, signal, onHeader) => {
    const options = { signal, onHeader };
    switch (start.rpc) {
      case "run": return this.engine.run(start.request, options)[Symbol.asyncIterator]();
      case "resume": return this.engine.resume(start.request, options)[Symbol.asyncIterator]();
      case "attach": return this.engine.attach(start.request, options)[Symbol.asyncIterator]();
    }
  };
}

/** Returns a message of a user with this text. */
export function userMessage(text: string) {
  return { role: Role.USER, parts: [{ part: { case: "text" as const, value: text } }] };
}

/**
 * Returns a copy that is the client's own (create hands a message through as it is), once it is sure that it can be
 * written. By bytes and not by clone: they turn lone surrogates into U+FFFD, where clone refuses them.
 */
function copyOf<Desc extends DescMessage>(schema: Desc, request: MessageInitShape<Desc>): MessageShape<Desc> {
  try {
    return fromBinary(schema, toBinary(schema, create(schema, request)));
  } catch (thrown) {
    const problem = thrown instanceof Error ? thrown.message : String(thrown);
    throw new EngineError("INVALID_REQUEST", problem, { code: Code.InvalidArgument, cause: thrown });
  }
}

function urlOf(target: string, tls: ClientOptions["tls"]): string {
  const url = `${tls ? "https" : "http"}://${target}`;
  if (!/^([^\s/@?#:[\]\\]+|\[[0-9a-fA-F:.]+\]):\d+$/.test(target) || !URL.canParse(url)) {
    throw new TypeError(`the engine's address must be HOST:PORT, not ${JSON.stringify(target)}`);
  }
  return url;
}

function credentials({ token, tenant, subject }: ClientOptions): Interceptor {
  for (const [name, value] of Object.entries({ token, tenant, subject })) {
    if (typeof value === "string") checkHeader(name, value);
  }
  return (next) => async (request) => {
    const found = typeof token === "function" ? checkHeader("token", await token()) : token;
    const pairs = {
      authorization: found && `Bearer ${found}`, "dualclaw-tenant": tenant, "dualclaw-subject": subject,
    };
    for (const [key, value] of Object.entries(pairs)) {
      if (value && !request.header.has(key)) request.header.set(key, value);
    }
    return next(request);
  };
}

function checkHeader(name: string, value: string): string {
  // The value itself is not in the text: it may be a secret.
  if (!/^[\x20-\x7e]*$/.test(value.trim())) throw new TypeError(`${name} must be printable ASCII: a header carries it`);
  return value;
}

function present(run: Run | undefined): Run {
  if (!run) throw new EngineError("INTERNAL", "the engine answered without a run", { code: 13 });
  return run;
}

/** Returns a UUIDv7: unique, and sortable by the time it was made. */
function newRequestId(): string {
  const bytes = randomBytes(16);
  bytes.writeUIntBE(Date.now(), 0, 6);
  bytes[6] = (bytes[6]! & 0x0f) | 0x70;
  bytes[8] = (bytes[8]! & 0x3f) | 0x80;
  return bytes.toString("hex").replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}
