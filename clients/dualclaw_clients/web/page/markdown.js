// A small, safe part of Markdown: fences, headings, lists, bold and inline code.
//
// Every piece of the model's text reaches the page as a text node, so markup in it is shown and never run. Links
// and images stay text on purpose: an image address chosen by a model would be a way to send data out.
// Blocks are compared by their source: while text streams in, only the last one is built anew, and after a rewind
// only those that differ, so nothing flickers and a selection in earlier text survives.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const INLINE = /(`+)([^`](?:[\s\S]*?[^`])?)\1(?!`)|\*\*(\S(?:[\s\S]*?\S)?)\*\*/g;

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
    } else if (heading) {
      close();
      blocks.push({ kind: heading[1].length < 3 ? "h3" : "h4", source: line, text: heading[2] });
    } else if (item) {
      const kind = /\d/.test(item[2]) ? "ol" : "ul";
      if (!open || open.kind !== kind) {
        close();
        open = { kind, source: line, items: [], start: parseInt(item[2], 10) || 1 };
      } else {
        open.source += "\n" + line;
      }
      open.items.push(item[3]);
    } else if (!line.trim()) {
      if (open && (open.kind === "ul" || open.kind === "ol")) open.source += "\n";
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
  const element = make(block.kind);
  if (block.items) {
    if (block.kind === "ol") element.start = block.start;
    for (const text of block.items) element.append(inline(make("li"), text));
    return element;
  }
  return inline(element, block.text === undefined ? block.source : block.text);
}

function inline(element, text) {
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > from) element.append(text.slice(from, match.index));
    element.append(match[1] ? make("code", "", match[2]) : make("strong", "", match[3]));
    from = match.index + match[0].length;
  }
  if (from < text.length) element.append(text.slice(from));
  return element;
}

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}
