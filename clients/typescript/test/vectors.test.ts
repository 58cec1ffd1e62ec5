import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";

import { equals, fromBinary, fromJson, type JsonValue } from "@bufbuild/protobuf";

import { originalFrame, toText, toWire } from "../src/index.js";
import { EngineEventSchema } from "../src/v1.js";

interface Vector {
  name: string;
  event: JsonValue;
  binary: string;
  wire: string | null;
  frame: string | null;
  to_text: string;
}

const folder = new URL("../../../../proto/vectors/", import.meta.url);
const read = (name: string) => JSON.parse(readFileSync(new URL(name, folder), "utf8")) as Vector[];

test("golden vectors give the same bytes as in every other language", async (t) => {
  for (const file of readdirSync(folder).filter((name) => name.endsWith(".json"))) {
    for (const vector of read(file)) {
      await t.test(`golden ${vector.name}`, () => {
        const event = fromJson(EngineEventSchema, vector.event);
        const decoded = fromBinary(EngineEventSchema, Buffer.from(vector.binary, "hex"));
        assert.ok(equals(EngineEventSchema, event, decoded));
        assert.equal(toWire(event) ?? null, vector.wire);
        assert.equal(originalFrame(event) ?? null, vector.frame);
        assert.equal(toText(event), vector.to_text);
      });
    }
  }
});

test("events of newer engines: what is known has its wire form, the rest has none", async (t) => {
  for (const vector of read("inputs/from_binary.json")) {
    await t.test(vector.name, () => {
      const event = fromBinary(EngineEventSchema, Buffer.from(vector.binary, "hex"));
      assert.equal(toWire(event) ?? null, vector.wire);
    });
  }
});
