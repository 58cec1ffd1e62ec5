import { createServer, type Http2Server, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import type { TestContext } from "node:test";

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { BinaryWriter, WireType } from "@bufbuild/protobuf/wire";
import { Code, ConnectError, type HandlerContext } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";

import { EngineClient, type ClientOptions, type RunStream } from "../src/index.js";
import {
  EngineEventSchema, EngineService, ListRunsResponseSchema, type AttachRequest, type EngineEvent, type RunRequest,
} from "../src/v1.js";

export type Step = EngineEvent | EngineEvent[] | ConnectError | "hang";

/** Plays one script per call, in order, over a real socket: events are sent, an error ends the call. */
export class FakeEngine {
  readonly runs: RunRequest[] = [];
  readonly attaches: AttachRequest[] = [];
  /** Calls that the client hung up on. */
  left = 0;
  headers = true;
  /** Answers of ListRuns, in order. */
  readonly pages: MessageInitShape<typeof ListRunsResponseSchema>[] = [];
  readonly sessions = new Set<ServerHttp2Session>();
  server!: Http2Server;

  constructor(private readonly scripts: Step[][]) {}

  /** Goes away as a killed engine does. */
  async stop(): Promise<void> {
    for (const session of this.sessions) session.destroy();
    if (this.server.listening) await new Promise((closed) => this.server.close(closed));
  }

  /** Waits until no client is connected. */
  gone(): Promise<void> {
    return until(() => [...this.sessions].every((session) => session.destroyed));
  }

  async *play(context: HandlerContext): AsyncGenerator<{ events: EngineEvent[] }> {
    const script = this.scripts.shift() ?? [new ConnectError("no script is left", Code.Internal)];
    if (this.headers && !(script[0] instanceof ConnectError)) {
      context.responseHeader.set("dualclaw-run-id", "r");
      context.responseHeader.set("dualclaw-conversation-id", "c");
    }
    for (const step of script) {
      if (step instanceof ConnectError) throw step;
      if (step === "hang") await new Promise((_, reject) => context.signal.addEventListener("abort", () => {
        this.left += 1;
        reject(context.signal.reason);
      }));
      else yield { events: Array.isArray(step) ? step : [step] };
    }
  }
}

export function serve(t: TestContext, ...scripts: Step[][]): Promise<[FakeEngine, EngineClient, Http2Server]> {
  return serveAt(t, 0, {}, ...scripts);
}

/** Serves at a port (0: any) for a client with these options. */
export async function serveAt(
  t: TestContext, port: number, options: ClientOptions, ...scripts: Step[][]
): Promise<[FakeEngine, EngineClient, Http2Server]> {
  const fake = new FakeEngine(scripts);
  const server = createServer(connectNodeAdapter({
    connect: false,
    grpcWeb: false,
    routes: (router) => router.service(EngineService, {
      run: (request, context) => (fake.runs.push(request), fake.play(context)),
      listRuns: () => fake.pages.shift() ?? {},
      attach: (request, context) => (fake.attaches.push(request), fake.play(context)),
    }),
  }));
  fake.server = server;
  server.on("session", (session) => fake.sessions.add(session));
  await new Promise<void>((listening) => server.listen(port, "127.0.0.1", listening));
  t.after(async () => {
    client.close();
    await fake.stop();
  });
  const client = new EngineClient(`127.0.0.1:${(server.address() as AddressInfo).port}`, {
    ...options, reconnect: { firstMs: 1, totalMs: 60_000, ...options.reconnect },
  });
  return [fake, client, server];
}

export const delta = (seq: number, content: string) =>
  create(EngineEventSchema, { seq, runId: "r", payload: { case: "delta", value: { content } } });
export const done = (seq: number) =>
  create(EngineEventSchema, { seq, runId: "r", payload: { case: "done", value: {} } });
export const broken = () => new ConnectError("the connection broke", Code.Unavailable);

/** An error as the engine words it. */
export function refusal(code: Code, reason: string, metadata: Record<string, string> = {}): ConnectError {
  const info = new BinaryWriter().tag(1, WireType.LengthDelimited).string(reason)
    .tag(2, WireType.LengthDelimited).string("dualclaw");
  for (const [key, value] of Object.entries(metadata)) {
    const entry = new BinaryWriter().tag(1, WireType.LengthDelimited).string(key)
      .tag(2, WireType.LengthDelimited).string(value);
    info.tag(3, WireType.LengthDelimited).bytes(entry.finish());
  }
  const error = new ConnectError("refused", code);
  error.details.push({ type: "google.rpc.ErrorInfo", value: info.finish() } as never);
  return error;
}

export async function seqs(stream: RunStream): Promise<number[]> {
  const found: number[] = [];
  for await (const event of stream) found.push(event.seq);
  return found;
}


/** Returns a loopback port where nobody listens. */
export async function freePort(): Promise<number> {
  const server = createServer();
  await new Promise<void>((listening) => server.listen(0, "127.0.0.1", listening));
  const { port } = server.address() as AddressInfo;
  await new Promise((closed) => server.close(closed));
  return port;
}

/** Waits until something holds; fails after a minute. */
export async function until(holds: () => boolean): Promise<void> {
  for (let tries = 0; !holds(); tries += 1) {
    if (tries > 6000) throw new Error(`never came true: ${holds.toString()}`);
    await new Promise((later) => setTimeout(later, 10));
  }
}
