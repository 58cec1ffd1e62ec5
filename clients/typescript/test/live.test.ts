// These tests speak to the agent "conformance" of a real engine; tests/clients/languages of the repository starts it
// and sets DUALCLAW_ENGINE and DUALCLAW_CONTROL.
import assert from "node:assert/strict";
import { connect, createServer, type AddressInfo, type Socket } from "node:net";
import { describe, it } from "node:test";

import { equals } from "@bufbuild/protobuf";

import { EngineClient, EngineError, RunView, toWire, userMessage, type RunStream } from "../src/index.js";
import { DecisionAction, EngineEventSchema, StepSchema, StopReason, type EngineEvent } from "../src/v1.js";

const target = process.env.DUALCLAW_ENGINE ?? "";
const skip = target ? false : "DUALCLAW_ENGINE is not set: nothing was tested against a real engine";

const scenario = (name: string) => ({
  agent: "conformance", claw: "test", message: userMessage(`conformance: ${name}`),
});

async function collect(stream: RunStream): Promise<EngineEvent[]> {
  const events: EngineEvent[] = [];
  for await (const event of stream) events.push(event);
  return events;
}

function fold(events: EngineEvent[]): RunView {
  const view = new RunView();
  for (const event of events) view.apply(event);
  return view;
}

/** Holds a whole run against the rules of the contract that a client can see: R1 to R8. */
function checkRules(events: EngineEvent[]): void {
  const view = new RunView();
  let trace = "";
  for (const [at, event] of events.entries()) {
    assert.equal(event.seq, at + 1, "R1");
    if (view.terminal || !trace) trace = event.traceId;
    assert.match(trace, /^[0-9a-f]{32}$/, "R8");
    assert.equal(event.traceId, trace, "R8");
    assert.ok(event.runId && event.runId === events[0]!.runId, "R8");
    if (events[at - 1]?.payload.case === "interrupt") {
      assert.ok(event.payload.case === "done" && event.payload.value.stopReason === StopReason.INTERRUPTED, "R3");
    }
    view.apply(event);
    if (event.payload.case === "done") {
      const done = event.payload.value;
      assert.equal(done.content, view.text, "R5");
      assert.equal(done.processSteps.length, view.processSteps.length, "R6");
      for (const [index, step] of view.processSteps.entries()) {
        assert.ok(equals(StepSchema, step, done.processSteps[index]!), "R6");
      }
      assert.deepEqual(done.usedSkills, view.usedSkills, "R7");
      assert.deepEqual(done.usedMcp, view.usedMcp, "R7");
    }
  }
  assert.ok(view.terminal, "R2");
  if (view.interrupts.length === 0) assert.deepEqual(view.openSteps, [], "R4");
}

const refusedWith = (reason: string) => (error: unknown) => error instanceof EngineError && error.reason === reason;

describe("live", { skip, timeout: 600_000 }, () => {
  const client = target ? new EngineClient(target) : (undefined as never);
  for (const [name, text] of Object.entries({
    text: "Hello 你好 🙂", tool: "Two of three went well.", args: "Seen.", rewind: "This is right.",
    loop: "That was enough.",
  })) {
    it(`live scenario ${name}`, async () => {
      const events = await collect(await client.run(scenario(name)));
      checkRules(events);
      assert.equal(fold(events).text, text);
    });
  }

  it("live arguments keep every digit", async () => {
    const events = await collect(await client.run(scenario("args")));
    const step = events.find((event) => event.payload.case === "step")!;
    assert.ok(step.payload.case === "step");
    assert.ok(toWire(step)!.includes(`"args": ${step.payload.value.step!.argsJson}`));
    assert.ok(toWire(step)!.includes("12345678901234567890"));
  });

  it("live error is an event", async () => {
    const events = await collect(await client.run(scenario("error")));
    checkRules(events);
    const last = events.at(-1)!.payload;
    assert.ok(last.case === "error");
    assert.equal(last.value.diagnosis!.code, "model.bad_response");
  });

  it("live refusals are typed", async () => {
    await assert.rejects(client.run({ ...scenario("text"), agent: "nobody" }), refusedWith("UNKNOWN_AGENT"));
    await assert.rejects(client.getRun("no-such-run"), refusedWith("UNKNOWN_RUN"));
    await assert.rejects(client.attach({ runId: "no-such-run" }), refusedWith("UNKNOWN_RUN"));
  });

  for (const [action, text] of [
    [DecisionAction.APPROVE, "Done: paid 5 to a."], [DecisionAction.REJECT, "It was refused."],
  ] as const) {
    it(`live approval answered with ${DecisionAction[action]}`, async () => {
      const stream = await client.run(scenario("approval"));
      const events = await collect(stream);
      const [asked] = fold(events).interrupts;
      assert.equal(asked!.toolName, "pay");
      const answer = {
        runId: stream.runId, decisions: [{ interruptId: asked!.id, action, argsHash: asked!.argsHash }],
      };
      events.push(...(await collect(await client.resume(answer))));
      checkRules(events);
      assert.equal(fold(events).text, text);
      await assert.rejects(client.resume(answer), refusedWith("ALREADY_ANSWERED"));
    });
  }

  it("live question", async () => {
    const stream = await client.run(scenario("question"));
    const events = await collect(stream);
    const [asked] = fold(events).interrupts;
    const decision = { interruptId: asked!.id, action: DecisionAction.RESPOND, responseJson: '"blue"' };
    events.push(...(await collect(await client.resume({ runId: stream.runId, decisions: [decision] }))));
    checkRules(events);
    assert.match(fold(events).text, /blue/);
  });

  it("live cancel keeps the text", async () => {
    const stream = await client.run(scenario("slow"));
    const events: EngineEvent[] = [];
    for await (const event of stream) {
      events.push(event);
      if (events.length === 3) await client.cancel(stream.runId, "enough");
    }
    checkRules(events);
    const last = events.at(-1)!.payload;
    assert.ok(last.case === "done" && last.value.stopReason === StopReason.CANCELLED);
    assert.ok(last.value.content.startsWith("000 "));
  });

  it("live: the same request gives the same events", async () => {
    const request = { ...scenario("tool"), requestId: `ts-${Date.now()}-${process.pid}` };
    const once = await collect(await client.run(request));
    const twice = await collect(await client.run(request));
    assert.equal(once.length, twice.length, "R12");
    assert.ok(once.every((event, at) => equals(EngineEventSchema, event, twice[at]!)), "R12");
  });

  it("live attach gives what follows", async () => {
    const stream = await client.run(scenario("tool"));
    const events = await collect(stream);
    for (const afterSeq of events.keys()) {
      const rest = await collect(await client.attach({ runId: stream.runId, afterSeq }));
      assert.equal(rest.length, events.length - afterSeq, "R10");
      assert.ok(equals(EngineEventSchema, rest[0]!, events[afterSeq]!), "R10");
    }
    await assert.rejects(
      client.attach({ runId: stream.runId, afterSeq: 1000 }), refusedWith("AFTER_SEQ_OUT_OF_RANGE"),
    );
  });

  it("live runs are listed page by page", async () => {
    const stream = await client.run(scenario("text"));
    await collect(stream);
    const { conversationId, runId } = stream;
    const found = [];
    for await (const run of client.runs({ pageSize: 1, conversationId })) found.push(run.id);
    assert.deepEqual(found, [runId]);
  });

  it("live connections cut after any number of bytes lose and double nothing", async (t) => {
    const [host, port] = target.split(":");
    const sockets = new Set<Socket>();
    let limit = 0;
    const proxy = createServer((near) => {
      const far = connect(Number(port), host);
      let left = (limit += 61); // each connection lives a little longer, so that all end in the end
      far.on("data", (bytes) => {
        near.write(bytes.subarray(0, left));
        left -= bytes.length;
        if (left <= 0) near.destroy();
      });
      near.on("data", (bytes) => far.write(bytes));
      for (const [one, other] of [[near, far], [far, near]] as const) {
        sockets.add(one);
        one.on("error", () => undefined).on("close", () => other.destroy());
      }
    });
    await new Promise<void>((listening) => proxy.listen(0, "127.0.0.1", listening));
    t.after(() => {
      for (const socket of sockets) socket.destroy();
      proxy.close();
    });
    const { port: near } = proxy.address() as AddressInfo;
    for (const name of ["text", "tool", "rewind"]) {
      limit = 0;
      using cut = new EngineClient(`127.0.0.1:${near}`, { reconnect: { firstMs: 1, longestMs: 5 } });
      const stream = await cut.run(scenario(name));
      const events = await collect(stream);
      checkRules(events);
      const stored = await collect(await client.attach({ runId: stream.runId }));
      assert.equal(events.length, stored.length);
      assert.ok(events.every((event, at) => equals(EngineEventSchema, event, stored[at]!)));
      assert.ok(limit > 61, "no connection was cut");
    }
  });

  it("live kill loses and doubles nothing", async () => {
    const stream = await client.run(scenario("slow"));
    const events: EngineEvent[] = [];
    for await (const event of stream) {
      events.push(event);
      if (events.length === 5) {
        const answer = await fetch(`${process.env.DUALCLAW_CONTROL}/kill`, { method: "POST" });
        assert.equal(answer.status, 204);
      }
    }
    checkRules(events);
    assert.ok(stream.reconnects > 0);
    assert.ok(fold(events).text.endsWith("198 199 "));
  });
});
