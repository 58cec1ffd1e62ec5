/** Bounds of the contract: what lies beyond them reads as null (numbers) or as an empty object (nesting). */
const MAX_DEPTH = 100;
const MAX_DIGITS = 4000;

/**
 * Returns the JSON text of the one object that an args_json text stands for, in the canonical form of the contract.
 * Never throws: what is not one JSON object, or is nested deeper than 100, is "{}".
 *
 * Canonical text comes out as it went in. Use it, and not JSON.parse with JSON.stringify: those change integers beyond
 * 2^53, floats such as 1.0, and the order of keys that look like numbers.
 */
export function canonicalArgs(args: string): string {
  try {
    const reader = new Reader(args);
    const value = reader.whole();
    return value.startsWith("{") ? value : "{}";
  } catch (error) {
    if (error instanceof Unreadable) return "{}";
    throw error;
  }
}

/** Returns a text as a JSON string: only quote, backslash and U+0000 to U+001F are escaped; lone surrogates are U+FFFD. */
export function quote(text: string): string {
  return `"${text.toWellFormed().replace(/["\\\u0000-\u001f]/g, escaped)}"`;
}

const SHORT: Record<string, string> = {
  '"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t",
};
const LONG: Record<string, string> = {
  '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t",
};

function escaped(character: string): string {
  return SHORT[character] ?? `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;
}

class Unreadable extends Error {}

/** Reads JSON as Python's json module does, NaN and Infinity included, and writes what it reads as it goes. */
class Reader {
  private at = 0;

  constructor(private readonly text: string) {}

  whole(): string {
    this.space();
    const value = this.value(0);
    this.space();
    if (this.at !== this.text.length) throw new Unreadable();
    return value;
  }

  private match(pattern: RegExp): RegExpExecArray | null {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at = pattern.lastIndex;
    return found;
  }

  private space(): void {
    this.match(/[ \t\n\r]*/y);
  }

  private accept(character: string): boolean {
    if (this.text[this.at] !== character) return false;
    this.at += 1;
    return true;
  }

  private value(depth: number): string {
    switch (this.text[this.at]) {
      case "{": return this.object(depth + 1);
      case "[": return this.list(depth + 1);
      case '"': return quote(this.string());
    }
    const word = this.match(/null|true|false/y);
    if (word) return word[0];
    return this.match(/NaN|-?Infinity/y) ? "null" : this.number();
  }

  private object(depth: number): string {
    if (depth > MAX_DEPTH) throw new Unreadable();
    const members = new Map<string, string>(); // of duplicate keys the last wins, at the place of the first
    this.at += 1;
    this.space();
    if (this.accept("}")) return "{}";
    for (;;) {
      this.space();
      if (this.text[this.at] !== '"') throw new Unreadable();
      const key = this.string();
      this.space();
      if (!this.accept(":")) throw new Unreadable();
      this.space();
      members.set(key, this.value(depth));
      this.space();
      if (this.accept("}")) break;
      if (!this.accept(",")) throw new Unreadable();
    }
    return `{${[...members].map(([key, value]) => `${quote(key)}: ${value}`).join(", ")}}`;
  }

  private list(depth: number): string {
    if (depth > MAX_DEPTH) throw new Unreadable();
    const values: string[] = [];
    this.at += 1;
    this.space();
    if (this.accept("]")) return "[]";
    for (;;) {
      this.space();
      values.push(this.value(depth));
      this.space();
      if (this.accept("]")) return `[${values.join(", ")}]`;
      if (!this.accept(",")) throw new Unreadable();
    }
  }

  private string(): string {
    this.at += 1;
    let text = "";
    for (;;) {
      text += this.match(/[^"\\\u0000-\u001f]*/y)![0];
      if (this.accept('"')) return text.toWellFormed();
      const escape = this.match(/\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt]))/y);
      if (!escape) throw new Unreadable();
      text += escape[1] === undefined ? LONG[escape[2]!]! : String.fromCharCode(parseInt(escape[1], 16));
    }
  }

  private number(): string {
    const found = this.match(/-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/y);
    if (!found) throw new Unreadable();
    const literal = found[0];
    if (literal.replace(/[^0-9]/g, "").length > MAX_DIGITS) return "null";
    if (found[1] === undefined && found[2] === undefined) return literal === "-0" ? "0" : literal;
    return floatText(Number(literal));
  }
}

/** Prints a float as Python does: the shortest digits that read back as the same number. */
function floatText(number: number): string {
  if (!Number.isFinite(number)) return "null";
  if (number === 0) return Object.is(number, -0) ? "-0.0" : "0.0";
  const [mantissa = "", power = ""] = Math.abs(number).toExponential().split("e");
  const exponent = Number(power);
  const sign = number < 0 ? "-" : "";
  if (exponent < -4 || exponent >= 16) {
    const digits = String(Math.abs(exponent)).padStart(2, "0");
    return `${sign}${mantissa}e${exponent < 0 ? "-" : "+"}${digits}`;
  }
  const digits = mantissa.replace(".", "");
  if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${digits}`;
  const whole = digits.slice(0, exponent + 1).padEnd(exponent + 1, "0");
  return `${sign}${whole}.${digits.slice(exponent + 1) || "0"}`;
}
