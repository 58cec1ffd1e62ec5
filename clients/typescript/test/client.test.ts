import assert from "node:assert/strict";
import { getEventListeners } from "node:events";
import { describe, it } from "node:test";

import { create } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";

import { EngineClient } from "../src/index.js";
import { ListRunsRequestSchema } from "../src/v1.js";
import { delta, freePort, seqs, serve } from "./fake.js";

describe("a client", { timeout: 120_000 }, () => {
  it("refuses an address that is none", () => {
    for (const target of ["http://127.0.0.1:50051", "::1:50051", "host:99999", "me@host:1", "host", "host:0x1", ""]) {
      assert.throws(() => new EngineClient(target), { name: "TypeError", message: /HOST:PORT/ }, target);
    }
    for (const target of ["127.0.0.1:50051", "[::1]:50051", "engine.example:443"]) new EngineClient(target).close();
  });

  it("refuses options that are none, and takes undefined for the default", () => {
    for (const reconnect of [{ totalMs: Number.NaN }, { firstMs: -1 }, { longestMs: "5" as unknown as number }]) {
      const told = { name: "TypeError", message: /reconnect\.\w+Ms/ };
      assert.throws(() => new EngineClient("127.0.0.1:1", { reconnect }), told);
    }
    for (const token of ["口令", "a\nb"]) {
      assert.throws(() => new EngineClient("127.0.0.1:1", { token }), { name: "TypeError", message: /token/ });
    }
    const named = { name: "TypeError", message: /subject/ };
    assert.throws(() => new EngineClient("127.0.0.1:1", { subject: "张三" }), named);
    new EngineClient("127.0.0.1:1", { reconnect: { totalMs: undefined as unknown as number } }).close();
  });

  it("that finds no engine says so for plain calls, too", async () => {
    using client = new EngineClient(`127.0.0.1:${await freePort()}`);
    await assert.rejects(client.getRun("r"), { name: "EngineError", unreachable: true, message: /no engine answers/ });
  });

  it("whose plain call is aborted throws the signal's reason", async (t) => {
    const [, client] = await serve(t);
    const leaving = new AbortController();
    leaving.abort(new Error("enough"));
    await assert.rejects(client.getRun("r", { signal: leaving.signal }), /enough/);
    await assert.rejects(client.runs({}, { signal: leaving.signal }).next(), /enough/);
    assert.deepEqual(getEventListeners(leaving.signal, "abort"), []);
  });

  it("leaves the caller's list request as it is", async (t) => {
    const [fake, client] = await serve(t);
    fake.pages.push({ runs: [{ id: "a" }], nextPageToken: "2" }, { runs: [{ id: "b" }] });
    const request = create(ListRunsRequestSchema, { pageSize: 1 });
    const found: string[] = [];
    for await (const run of client.runs(request)) found.push(`${run.id}${request.pageToken}`);
    assert.deepEqual(found, ["a", "b"]);
  });

  it("that is closed ends its streams with an error and makes no more calls", async (t) => {
    const [fake, client] = await serve(t, [delta(1, "a"), "hang"]);
    const stream = await client.ask("hi");
    const reading = seqs(stream);
    client.close();
    client.close();
    await assert.rejects(reading, { name: "AbortError", message: /closed/ });
    await assert.rejects(client.ask("hi"), { name: "AbortError", message: /closed/ });
    await assert.rejects(client.getRun("r"), { name: "AbortError", message: /closed/ });
    await assert.rejects(client.engine.getRun({ runId: "r" }), /closed/);
    assert.equal(fake.attaches.length, 0);
    await fake.gone();
  });

  it("understands a refusal whose details are garbage", async (t) => {
    const error = new ConnectError("no", Code.FailedPrecondition);
    error.details.push({ type: "google.rpc.ErrorInfo", value: new Uint8Array([0x0a, 0xff]) } as never);
    const [, client] = await serve(t, [error]);
    await assert.rejects(client.ask("hi"), { name: "EngineError", code: Code.FailedPrecondition, message: "no" });
  });
});
