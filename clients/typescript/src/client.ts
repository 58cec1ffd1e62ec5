import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { createClient, type Client, type Interceptor, type Transport } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import type { SecureClientSessionOptions } from "node:http2";
import { randomBytes } from "node:crypto";

import { EngineError, judge } from "./errors.js";
import { RECONNECT, RunStream, type OpenCall, type Reconnect, type Start } from "./stream.js";
import {
  AgentService, AttachRequestSchema, ConversationService, EngineService, ListRunsRequestSchema, OperatorService,
  ResumeRequestSchema, Role, RunRequestSchema,
  type ListRunsRequest, type Run,
} from "./v1.js";

const MAX_MESSAGE = 64 * 1024 * 1024;
const UNARY_TIMEOUT_MS = 30_000;

export interface ClientOptions {
  /** API key or JWT, sent with every call; a function is asked for each. */
  token?: string | (() => string | Promise<string>);
  /** Acts for somebody else; only the role service may. */
  tenant?: string;
  subject?: string;
  /** TLS: true trusts the system's authorities; an object holds `ca`, `key`, `cert` and the like. */
  tls?: boolean | SecureClientSessionOptions;
  /** How lost streams are taken up again. */
  reconnect?: Partial<Reconnect>;
  /** Interceptors of connect, for tracing and the like. */
  interceptors?: Interceptor[];
}

export interface CallOptions {
  /** Aborting it ends the stream or call, never the run. */
  signal?: AbortSignal;
}

/**
 * A connection to one engine, for any number of calls at once. It connects with the first call.
 *
 * `engine`, `conversations`, `agents` and `operators` are the plain stubs of the contract; they throw ConnectError.
 */
export class EngineClient {
  readonly engine: Client<typeof EngineService>;
  readonly conversations: Client<typeof ConversationService>;
  readonly agents: Client<typeof AgentService>;
  readonly operators: Client<typeof OperatorService>;
  readonly #target: string;
  readonly #reconnect: Reconnect;

  /**
   * @param target the engine's address, HOST:PORT.
   */
  constructor(target: string, options: ClientOptions = {}) {
    if (!/^[^\s/]+:\d+$/.test(target)) throw new TypeError(`the engine's address must be HOST:PORT, not ${target}`);
    this.#target = target;
    this.#reconnect = { ...RECONNECT, ...options.reconnect };
    const transport = transportTo(target, options);
    this.engine = createClient(EngineService, transport);
    this.conversations = createClient(ConversationService, transport);
    this.agents = createClient(AgentService, transport);
    this.operators = createClient(OperatorService, transport);
  }

  /**
   * Starts a run and returns its first segment as a stream, once the engine has accepted it. Without a requestId the
   * client makes one, so that a start whose answer got lost is not started twice.
   */
  run(request: MessageInitShape<typeof RunRequestSchema>, options?: CallOptions): Promise<RunStream> {
    const copy = create(RunRequestSchema, request);
    copy.requestId ||= newRequestId();
    return this.#stream({ rpc: "run", request: copy }, options);
  }

  /** Runs a text: a new conversation with the engine's default agent. */
  ask(text: string, options?: CallOptions): Promise<RunStream> {
    return this.run({ message: userMessage(text) }, options);
  }

  /** Answers an interrupted run and returns its next segment as a stream. */
  resume(request: MessageInitShape<typeof ResumeRequestSchema>, options?: CallOptions): Promise<RunStream> {
    const copy = create(ResumeRequestSchema, request);
    copy.requestId ||= newRequestId();
    return this.#stream({ rpc: "resume", request: copy }, options);
  }

  /** Follows a run: every event after `afterSeq`, stored ones first. With `wait` it stays until the run is final. */
  attach(request: MessageInitShape<typeof AttachRequestSchema>, options?: CallOptions): Promise<RunStream> {
    return this.#stream({ rpc: "attach", request: create(AttachRequestSchema, request) }, options);
  }

  /** Asks a run to end. The answer may still say RUNNING; its stream tells the end. */
  async cancel(runId: string, reason = "", options?: CallOptions): Promise<Run> {
    const { run } = await typed(this.engine.cancel({ runId, reason }, unary(options)));
    return present(run);
  }

  /** Returns a run. */
  async getRun(runId: string, options?: CallOptions): Promise<Run> {
    const { run } = await typed(this.engine.getRun({ runId }, unary(options)));
    return present(run);
  }

  /** Yields the runs that fit the request's filters, newest first, page by page as they are asked for. */
  async *runs(
    request: MessageInitShape<typeof ListRunsRequestSchema> = {}, options?: CallOptions,
  ): AsyncGenerator<Run, void, undefined> {
    const next: ListRunsRequest = create(ListRunsRequestSchema, request);
    do {
      const page = await typed(this.engine.listRuns(next, unary(options)));
      yield* page.runs;
      next.pageToken = page.nextPageToken;
    } while (next.pageToken);
  }

  async #stream(start: Start, options: CallOptions | undefined): Promise<RunStream> {
    options?.signal?.throwIfAborted();
    const stream = new RunStream(this.#open, start, this.#reconnect, this.#target, options?.signal);
    try {
      await stream.connect();
    } catch (error) {
      stream.close();
      throw error;
    }
    return stream;
  }

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

function transportTo(target: string, options: ClientOptions): Transport {
  const credentials: Interceptor = (next) => async (request) => {
    const token = typeof options.token === "function" ? await options.token() : options.token;
    const pairs = { authorization: token && `Bearer ${token}`, "dualclaw-tenant": options.tenant, "dualclaw-subject": options.subject };
    for (const [key, value] of Object.entries(pairs)) {
      if (value && !request.header.has(key)) request.header.set(key, value);
    }
    return next(request);
  };
  return createGrpcTransport({
    baseUrl: `${options.tls ? "https" : "http"}://${target}`,
    interceptors: [credentials, ...(options.interceptors ?? [])],
    nodeOptions: typeof options.tls === "object" ? options.tls : {},
    pingIntervalMs: 30_000,
    pingTimeoutMs: 10_000,
    readMaxBytes: MAX_MESSAGE,
    writeMaxBytes: MAX_MESSAGE,
  });
}

function unary(options: CallOptions | undefined) {
  return { timeoutMs: UNARY_TIMEOUT_MS, ...(options?.signal && { signal: options.signal }) };
}

async function typed<T>(call: Promise<T>): Promise<T> {
  try {
    return await call;
  } catch (thrown) {
    throw judge(thrown).error;
  }
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
