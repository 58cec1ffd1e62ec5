import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { it } from "node:test";

it("what the README shows is code that compiles", () => {
  const folder = new URL("../../", import.meta.url);
  const source = flat(readFileSync(new URL("test/readme.ts", folder), "utf8"));
  const blocks = readFileSync(new URL("README.md", folder), "utf8").split("```ts\n").slice(1);
  assert.ok(blocks.length >= 4);
  for (const block of blocks) {
    const lines = block.split("```")[0]!.split("\n");
    const imports = lines.filter((line) => line.startsWith("import "));
    for (const line of imports) assert.ok(source.includes(line), line);
    const code = flat(lines.filter((line) => !imports.includes(line)).join("\n"));
    assert.ok(source.includes(code), code);
  }
});

function flat(text: string): string {
  return text.split(/\s+/).filter((word) => word).join(" ");
}
