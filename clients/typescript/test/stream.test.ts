import assert from "node:assert/strict";
import { createServer, type Http2Server, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { describe, it, type TestContext } from "node:test";

import { create } from "@bufbuild/protobuf";
import { BinaryWriter, WireType } from "@bufbuild/protobuf/wire";
import { Code, ConnectError, type HandlerContext } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";

import { EngineClient, EngineError, type RunStream } from "../src/index.js";
import {
  EngineEventSchema, EngineService, type AttachRequest, type EngineEvent, type RunRequest,
} from "../src/v1.js";

type Step = EngineEvent | EngineEvent[] | ConnectError | "hang";

/** Plays one script per call, in order, over a real socket: events are sent, an error ends the call. */
class FakeEngine {
  readonly runs: RunRequest[] = [];
  readonly attaches: AttachRequest[] = [];
  headers = true;

  constructor(private readonly scripts: Step[][]) {}

  async *play(context: HandlerContext): AsyncGenerator<{ events: EngineEvent[] }> {
    const script = this.scripts.shift() ?? [new ConnectError("no script is left", Code.Internal)];
    if (this.headers && !(script[0] instanceof ConnectError)) {
      context.responseHeader.set("dualclaw-run-id", "r");
      context.responseHeader.set("dualclaw-conversation-id", "c");
    }
    for (const step of script) {
      if (step instanceof ConnectError) throw step;
      if (step === "hang") await new Promise((_, reject) => context.signal.addEventListener("abort", () => reject(context.signal.reason)));
      else yield { events: Array.isArray(step) ? step : [step] };
    }
  }
}

async function serve(t: TestContext, ...scripts: Step[][]): Promise<[FakeEngine, EngineClient, Http2Server]> {
  const fake = new FakeEngine(scripts);
  const server = createServer(connectNodeAdapter({
    connect: false,
    grpcWeb: false,
    routes: (router) => router.service(EngineService, {
      run: (request, context) => (fake.runs.push(request), fake.play(context)),
      attach: (request, context) => (fake.attaches.push(request), fake.play(context)),
    }),
  }));
  const sessions = new Set<ServerHttp2Session>();
  server.on("session", (session) => sessions.add(session));
  await new Promise<void>((listening) => server.listen(0, "127.0.0.1", listening));
  t.after(() => {
    for (const session of sessions) session.destroy();
    server.close();
  });
  const client = new EngineClient(`127.0.0.1:${(server.address() as AddressInfo).port}`, {
    reconnect: { firstMs: 1, totalMs: 3000 },
  });
  return [fake, client, server];
}

const delta = (seq: number, content: string) =>
  create(EngineEventSchema, { seq, runId: "r", payload: { case: "delta", value: { content } } });
const done = (seq: number) =>
  create(EngineEventSchema, { seq, runId: "r", payload: { case: "done", value: {} } });
const broken = () => new ConnectError("the connection broke", Code.Unavailable);

/** An error as the engine words it. */
function refusal(code: Code, reason: string, metadata: Record<string, string> = {}): ConnectError {
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

async function seqs(stream: RunStream): Promise<number[]> {
  const found: number[] = [];
  for await (const event of stream) found.push(event.seq);
  return found;
}

describe("a stream", { timeout: 30_000 }, () => {
  it("is taken up again after the last event seen; what comes twice is skipped", async (t) => {
    const [fake, client] = await serve(t,
      [delta(1, "a"), delta(2, "b"), broken()], [broken()],
      [[delta(2, "b"), delta(3, "c")], broken()], [done(4)],
    );
    const stream = await client.ask("hi");
    assert.deepEqual(await seqs(stream), [1, 2, 3, 4]);
    assert.deepEqual(fake.attaches.map((request) => request.afterSeq), [2, 2, 3]);
    assert.deepEqual([stream.runId, stream.conversationId, stream.lastSeq], ["r", "c", 4]);
    assert.equal(stream.reconnects, 2);
  });

  it("whose start broke is started again with its requestId", async (t) => {
    const [fake, client] = await serve(t, [broken()], [delta(1, "a"), done(2)]);
    assert.deepEqual(await seqs(await client.ask("hi")), [1, 2]);
    assert.equal(fake.runs.length, 2);
    assert.match(fake.runs[0]!.requestId, /^[0-9a-f]{8}-[0-9a-f]{4}-7/);
    assert.equal(fake.runs[0]!.requestId, fake.runs[1]!.requestId);
  });

  it("fills a gap from the log", async (t) => {
    const [fake, client] = await serve(t, [delta(1, "a"), delta(3, "c")], [delta(2, "b"), delta(3, "c"), done(4)]);
    assert.deepEqual(await seqs(await client.ask("hi")), [1, 2, 3, 4]);
    assert.equal(fake.attaches[0]!.afterSeq, 1);
  });

  it("does not take an early end for the end", async (t) => {
    const [, client] = await serve(t, [delta(1, "a")], [delta(2, "b")], [done(3)]);
    assert.deepEqual(await seqs(await client.ask("hi")), [1, 2, 3]);
  });

  it("fails when the same place is spoilt twice", async (t) => {
    const [, client] = await serve(t, [delta(1, "a")], [], []);
    const stream = await client.ask("hi");
    await assert.rejects(seqs(stream), (error: unknown) => error instanceof EngineError && error.reason === "INTERNAL");
  });

  it("that the engine refuses throws its reason at once", async (t) => {
    const [fake, client] = await serve(t, [refusal(Code.FailedPrecondition, "CONVERSATION_BUSY", { run_id: "r" })]);
    await assert.rejects(client.ask("hi"), (error: unknown) => {
      assert.ok(error instanceof EngineError);
      assert.deepEqual([error.reason, error.metadata, error.code], ["CONVERSATION_BUSY", { run_id: "r" }, Code.FailedPrecondition]);
      return true;
    });
    assert.equal(fake.runs.length, 1);
  });

  it("of an engine without headers is understood all the same", async (t) => {
    const [fake, client] = await serve(t,
      [delta(1, "a"), broken()], [done(2)], [refusal(Code.OutOfRange, "AFTER_SEQ_OUT_OF_RANGE")],
    );
    fake.headers = false;
    const stream = await client.ask("hi");
    assert.deepEqual(await seqs(stream), [1, 2]);
    assert.equal(stream.runId, "r");
    await assert.rejects(client.attach({ runId: "r", afterSeq: 9 }),
      (error: unknown) => error instanceof EngineError && error.reason === "AFTER_SEQ_OUT_OF_RANGE");
  });

  it("ends with its signal, and nothing is tried again", async (t) => {
    const [fake, client] = await serve(t, [delta(1, "a"), "hang"]);
    const leaving = new AbortController();
    const stream = await client.ask("hi", { signal: leaving.signal });
    await assert.rejects(async () => {
      for await (const _ of stream) leaving.abort();
    }, { name: "AbortError" });
    assert.equal(fake.attaches.length, 0);
  });

  it("ends without error when it is closed", async (t) => {
    const [, client] = await serve(t, [delta(1, "a"), "hang"]);
    const stream = await client.ask("hi");
    const found: number[] = [];
    for await (const event of stream) {
      found.push(event.seq);
      stream.close();
    }
    assert.deepEqual(found, [1]);
  });

  it("gives up in the end and says where it stood", async (t) => {
    const [, client] = await serve(t, [delta(1, "a"), broken()], ...Array.from({ length: 2000 }, () => [broken()]));
    await assert.rejects(seqs(await client.ask("hi")), (error: unknown) => {
      assert.ok(error instanceof EngineError && error.unreachable);
      assert.match(error.message, /run r, after event 1/);
      return true;
    });
  });

  it("to nobody fails at once", async () => {
    const server = createServer();
    await new Promise<void>((listening) => server.listen(0, "127.0.0.1", listening));
    const { port } = server.address() as AddressInfo;
    await new Promise((closed) => server.close(closed));
    await assert.rejects(new EngineClient(`127.0.0.1:${port}`).ask("hi"), (error: unknown) => {
      assert.ok(error instanceof EngineError && error.unreachable);
      assert.match(error.message, /no engine answers/);
      return true;
    });
  });
});

it("an address that is none is refused when the client is made", () => {
  assert.throws(() => new EngineClient("http://127.0.0.1:50051"), /HOST:PORT/);
});
