// A small, safe part of Markdown: fences, headings, lists in lists, tables, rules, bold, italics and inline code.
//
// Every piece of the model's text reaches the page as a text node, so markup in it is shown and never run. Links
// and images stay text on purpose: an image address chosen by a model would be a way to send data out.
// Blocks are compared by their source: while text streams in, only the last one is built anew, and after a rewind
// only those that differ, so nothing flickers and a selection in earlier text survives.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const DELIMITERS = /^\s*\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?\s*)?$/;   // the line below the head of a table
// Code, bold, italics. A star between spaces or inside a word is a star.
const INLINE = /(`+)([^`](?:[\s\S]*?[^`])?)\1(?!`)|\*\*(\S(?:[\s\S]*?\S)?)\*\*|(?<![\w*])\*([^\s*](?:[^*\n]*[^\s*])?)\*(?![\w*])/g;

export function renderInto(element, text) {
  const blocks = split(text);
  const nodes = element.children;
  blocks.forEach((block, index) => {
    const old = nodes[index];
    if (old && old.source === block.source && old.kind === block.kind) return;
    if (old && old.kind === "p" && block.kind === "p" && append(old, block.source)) return;
    const fresh = build(block);
    fresh.source = block.source;
    fresh.kind = block.kind;
    if (old) old.replaceWith(fresh);
    else element.append(fresh);
  });
  while (nodes.length > blocks.length) element.lastElementChild.remove();
}

// Plain text that only grew: one text node is extended instead of replaced.
function append(node, source) {
  const only = node.childNodes.length === 1 ? node.firstChild : null;
  if (!only || only.nodeType !== Node.TEXT_NODE || !source.startsWith(node.source) || /[`*]/.test(source)) return false;
  only.appendData(source.slice(node.source.length));
  node.source = source;
  return true;
}

export function split(text) {
  const blocks = [];
  let open = null;
  const close = () => { if (open) blocks.push(open); open = null; };
  for (const line of text.split("\n")) {
    if (open && open.kind === "code") {
      open.source += "\n" + line;
      if (line.trim().startsWith(open.fence) && /^[`~]+$/.test(line.trim())) close();
      else open.lines.push(line);
      continue;
    }
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    if (fence) {
      close();
      open = { kind: "code", source: line, fence: fence[1], language: fence[2], lines: [] };
    } else if (open && open.kind === "p" && DELIMITERS.test(line) && lastLine(open.source).includes("|")) {
      const head = lastLine(open.source);
      open.source = open.source.slice(0, -head.length - 1);
      if (!open.source) open = null;
      close();
      open = { kind: "table", source: `${head}\n${line}`, rows: [cells(head)] };
    } else if (open && open.kind === "table" && line.includes("|")) {
      open.source += "\n" + line;
      open.rows.push(cells(line));
    } else if (RULE.test(line)) {
      close();
      blocks.push({ kind: "hr", source: line });
    } else if (heading) {
      close();
      blocks.push({ kind: heading[1].length < 3 ? "h3" : "h4", source: line, text: heading[2] });
    } else if (item) {
      const start = parseInt(item[2], 10);
      const place = { indent: item[1].replaceAll("\t", "    ").length, kind: Number.isNaN(start) ? "ul" : "ol", start };
      if (open && open.items && (open.kind === place.kind || place.indent >= open.places[0].indent + 2)) {
        open.source += "\n" + line;
      } else {
        close();
        open = { kind: place.kind, source: line, items: [], places: [] };
      }
      open.items.push(item[3]);
      open.places.push(place);
    } else if (!line.trim()) {
      if (open && open.items) open.source += "\n";
      else close();
    } else if (open && open.items && /^\s/.test(line)) {
      open.source += "\n" + line;
      open.items[open.items.length - 1] += "\n" + line.trim();
    } else if (open && open.kind === "p") {
      open.source += "\n" + line;
    } else {
      close();
      open = { kind: "p", source: line };
    }
  }
  close();
  return blocks;
}

function build(block) {
  if (block.kind === "code") {
    const figure = make("figure", "code");
    if (block.language) figure.append(make("figcaption", "", block.language));
    const pre = make("pre");
    pre.append(make("code", "", block.lines.join("\n")));
    figure.append(pre);
    return figure;
  }
  if (block.kind === "hr") return make("hr");
  if (block.items) return buildLists(block);
  if (block.kind === "table") return buildTable(block);
  return inline(make(block.kind), block.text === undefined ? block.source : block.text);
}

function buildLists({ items, places }) {
  const open = [];   // from the outermost list to the one that takes the next item
  items.forEach((text, index) => {
    const { indent, kind, start } = places[index];
    while (open.length > 1 && indent < open.at(-1).indent) open.pop();
    if (!open.length || indent >= open.at(-1).indent + 2) {
      const list = make(kind);
      if (kind === "ol") list.start = start;
      if (open.length) open.at(-1).list.lastElementChild.append(list);
      open.push({ indent, list });
    }
    open.at(-1).list.append(inline(make("li"), text));
  });
  return open[0].list;
}

function buildTable({ rows }) {
  const box = make("div", "table");
  const table = make("table");
  rows.forEach((row, index) => {
    const line = make("tr");
    for (const text of row) line.append(inline(make(index ? "td" : "th"), text));
    table.append(line);
  });
  box.append(table);
  return box;
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((text) => text.replaceAll("\\|", "|").trim());
}

function lastLine(text) {
  return text.slice(text.lastIndexOf("\n") + 1);
}

function inline(element, text) {
  element.dir = "auto";   // by its own first letter: Arabic reads from the right beside English
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > from) element.append(text.slice(from, match.index));
    element.append(match[1] ? make("code", "", match[2]) : match[3] ? make("strong", "", match[3]) : make("em", "", match[4]));
    from = match.index + match[0].length;
  }
  if (from < text.length) element.append(text.slice(from));
  return element;
}

// Characters that are not seen, or make others be seen in another place: what somebody approves must be what it says.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

// Appends foreign text to an element, with hidden characters by their numbers. Returns the element.
export function spellOut(element, text) {
  let from = 0;
  for (const { 0: character, index } of text.matchAll(HIDDEN)) {
    const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    element.append(text.slice(from, index), make("span", "hidden-character", `U+${code}`));
    from = index + character.length;
  }
  element.append(text.slice(from));
  return element;
}

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}
