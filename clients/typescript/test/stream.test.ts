import assert from "node:assert/strict";
import { getEventListeners } from "node:events";
import { createServer } from "node:net";
import { describe, it } from "node:test";

import { create } from "@bufbuild/protobuf";
import { Code } from "@connectrpc/connect";

import { EngineClient, EngineError } from "../src/index.js";
import { RunRequestSchema } from "../src/v1.js";
import { broken, delta, done, freePort, refusal, seqs, serve, serveAt, until } from "./fake.js";

describe("a stream", { timeout: 120_000 }, () => {
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
    const reconnect = { totalMs: 500 };
    const [, client] = await serveAt(t, 0, { reconnect },
      [delta(1, "a"), broken()], ...Array.from({ length: 2000 }, () => [broken()]));
    await assert.rejects(seqs(await client.ask("hi")), (error: unknown) => {
      assert.ok(error instanceof EngineError && error.unreachable);
      assert.match(error.message, /run r, after event 1/);
      return true;
    });
  });

  it("to nobody fails at once", async () => {
    const port = await freePort();
    await assert.rejects(new EngineClient(`127.0.0.1:${port}`).ask("hi"), (error: unknown) => {
      assert.ok(error instanceof EngineError && error.unreachable);
      assert.match(error.message, /no engine answers/);
      return true;
    });
  });
});

describe("a stream that is left", { timeout: 120_000 }, () => {
  it("before its first read ends the call", async (t) => {
    const [fake, client] = await serve(t, [delta(1, "a"), "hang"]);
    await (await client.ask("hi"))[Symbol.asyncIterator]().return();
    await until(() => fake.left === 1);
  });

  it("during a read ends the call, and the read with it", async (t) => {
    const [fake, client] = await serve(t, [delta(1, "a"), "hang"]);
    const events = (await client.ask("hi"))[Symbol.asyncIterator]();
    await events.next();
    const reading = events.next();
    await events.return();
    assert.equal((await reading).done, true);
    await until(() => fake.left === 1);
  });

  it("during the wait for the next attempt ends at once", async (t) => {
    const reconnect = { firstMs: 600_000, longestMs: 600_000, totalMs: Infinity };
    const [fake, client] = await serveAt(t, 0, { reconnect },
      [delta(1, "a"), broken()], [broken()]);
    const leaving = new AbortController();
    const stream = await client.ask("hi", { signal: leaving.signal });
    const reading = seqs(stream);
    await until(() => fake.attaches.length === 1);
    leaving.abort(new Error("enough"));
    await assert.rejects(reading, /enough/);
    assert.equal(fake.attaches.length, 1);
  });

  it("gives nothing more, also of what came in one message", async (t) => {
    const batch = [delta(1, "a"), delta(2, "b"), done(3)];
    const [, client] = await serve(t, [batch], [batch]);
    const closed = await client.ask("hi");
    const found: number[] = [];
    for await (const event of closed) {
      found.push(event.seq);
      closed.close();
    }
    assert.deepEqual([found, closed.lastSeq], [[1], 1]);
    const leaving = new AbortController();
    await assert.rejects(async () => {
      for await (const _ of await client.ask("hi", { signal: leaving.signal })) leaving.abort();
    }, { name: "AbortError" });
  });

  it("leaves nothing at a signal that lives on", async (t) => {
    const [, client] = await serve(t, [broken()], [delta(1, "a"), broken()], [done(2)]);
    const { signal } = new AbortController();
    const stream = await client.ask("hi", { signal });
    assert.equal(getEventListeners(signal, "abort").length, 1);
    await seqs(stream);
    assert.deepEqual(getEventListeners(signal, "abort"), []);
  });

  it("may share its signal with any number of others", async (t) => {
    const [, client] = await serve(t, ...Array.from({ length: 20 }, () => [delta(1, "a"), "hang" as const]));
    const leaving = new AbortController();
    const warnings: Error[] = [];
    const warned = (warning: Error) => void warnings.push(warning);
    process.on("warning", warned);
    t.after(() => process.off("warning", warned));
    const streams = await Promise.all(Array.from({ length: 20 }, () => client.ask("hi", { signal: leaving.signal })));
    const readings = streams.map((stream) => assert.rejects(seqs(stream), { name: "AbortError" }));
    leaving.abort();
    await Promise.all(readings);
    assert.deepEqual(warnings, []);
  });

  it("is read once; another reader is told so", async (t) => {
    const [, client] = await serve(t, [delta(1, "a"), done(2)]);
    const stream = await client.ask("hi");
    await seqs(stream);
    await assert.rejects(seqs(stream), { name: "TypeError", message: /attach/ });
  });
});

it("text that is not well formed reaches the engine as U+FFFD", async (t) => {
  const [fake, client] = await serve(t, [done(1)]);
  await seqs(await client.ask("a\ud800b"));
  assert.equal(fake.runs[0]!.message!.parts[0]!.part.value, "a\ufffdb");
});

describe("a start", { timeout: 120_000 }, () => {
  it("leaves the caller's request as it is, so that it starts a second run", async (t) => {
    const [fake, client] = await serve(t, [done(1)], [done(1)]);
    const request = create(RunRequestSchema, {});
    await seqs(await client.run(request));
    await seqs(await client.run(request));
    assert.equal(request.requestId, "");
    assert.notEqual(fake.runs[0]!.requestId, fake.runs[1]!.requestId);
  });

  it("whose connection is reset is sent again", async (t) => {
    let resets = 0;
    const leaving = new AbortController();
    const server = createServer((socket) => {
      resets += 1;
      if (resets === 3) leaving.abort(new Error("enough"));
      socket.resetAndDestroy();
    });
    await new Promise<void>((listening) => server.listen(0, "127.0.0.1", listening));
    t.after(() => server.close());
    const { port } = server.address() as { port: number };
    const once = new EngineClient(`127.0.0.1:${port}`, { reconnect: { totalMs: 0 } });
    await assert.rejects(once.ask("hi"), { name: "EngineError", unreachable: true });
    assert.equal(resets, 1);
    const patient = new EngineClient(`127.0.0.1:${port}`, { reconnect: { totalMs: Infinity, firstMs: 1 } });
    await assert.rejects(patient.ask("hi", { signal: leaving.signal }), /enough/);
    assert.ok(resets >= 3);
  });

  it("that the program itself spoils fails at once with the cause", async (t) => {
    const [fake] = await serve(t);
    const options = { reconnect: { totalMs: Infinity } };
    const sealed = new Error("the vault is sealed");
    for (const spoilt of [
      { ...options, token: () => Promise.reject(sealed) },
      { ...options, interceptors: [() => () => Promise.reject(sealed)] },
    ]) {
      const [, client] = await serveAt(t, 0, spoilt, [done(1)]);
      await assert.rejects(client.ask("hi"), (error: unknown) => {
        assert.ok(error instanceof EngineError && !error.unreachable);
        assert.match(error.message, /the vault is sealed/);
        assert.equal(error.cause, sealed);
        return true;
      });
    }
    assert.equal(fake.runs.length, 0);
  });

  it("that cannot be written is an invalid request", async (t) => {
    const [fake, client] = await serve(t);
    const told = { reason: "INVALID_REQUEST", message: /max_steps/ };
    await assert.rejects(client.run({ options: { maxSteps: 1.5 } }), told);
    assert.equal(fake.runs.length, 0);
  });

  it("by TLS to an engine without fails at once", async (t) => {
    const [, , server] = await serve(t);
    const { port } = server.address() as { port: number };
    const client = new EngineClient(`127.0.0.1:${port}`, { tls: true, reconnect: { totalMs: Infinity } });
    await assert.rejects(client.ask("hi"), { name: "EngineError", unreachable: true, message: /no engine answers/ });
  });

  it("waits for an engine that was there before and is away for a moment", async (t) => {
    const [fake, client, server] = await serve(t, [done(1)], [done(1)]);
    const { port } = server.address() as { port: number };
    await seqs(await client.ask("hi"));
    await fake.stop();
    const starting = client.ask("again").then(seqs);
    await new Promise((later) => setTimeout(later, 50));
    const [next] = await serveAt(t, port, {}, [done(1)]);
    assert.deepEqual(await starting, [1]);
    assert.equal(next.runs.length, 1);
  });

  it("waits no longer than startMs, and not at all with 0", async (t) => {
    for (const startMs of [0, 200]) {
      const [fake, client] = await serveAt(t, 0, { reconnect: { startMs, totalMs: Infinity } }, [done(1)]);
      await seqs(await client.ask("hi"));
      await fake.stop();
      await assert.rejects(client.ask("again"), { unreachable: true, message: /no engine answers/ });
    }
  });

  it("waits for an engine that was never there when startMs says so", async (t) => {
    const port = await freePort();
    const client = new EngineClient(`127.0.0.1:${port}`, { reconnect: { startMs: 60_000, firstMs: 1, longestMs: 50 } });
    const starting = client.ask("hi").then(seqs);
    await new Promise((later) => setTimeout(later, 50));
    await serveAt(t, port, {}, [done(1)]);
    assert.deepEqual(await starting, [1]);
    client.close();
  });

  it("that waits for its engine ends with its signal", async () => {
    const leaving = new AbortController();
    const client = new EngineClient(`127.0.0.1:${await freePort()}`, {
      reconnect: { startMs: Infinity, firstMs: 600_000, longestMs: 600_000 },
    });
    const starting = client.ask("hi", { signal: leaving.signal });
    setTimeout(() => leaving.abort(), 50);
    await assert.rejects(starting, { name: "AbortError" });
  });
});
