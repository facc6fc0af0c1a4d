// Markdown as models write it: text to a tree, and a tree to DOM nodes.
//
// A node is a string or {tag, children} with `href` (a), `start` (ol) or `language` (pre). The time
// is linear in the text: closing marks are looked up through a cache, and nesting is limited. Text is
// never parsed as HTML.

const MAX_DEPTH = 8;
const MAX_URL = 2000;

const FENCE = /^( *)(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const CELL = /^:?-+:?$/;
const URL_PART = `(?:[^\\s()<>"\`]|\\([^\\s()<>"\`]{0,200}\\)){1,${MAX_URL}}`;
const LINK_TARGET = new RegExp(`\\]\\(<?((?:https?://|mailto:)${URL_PART})>?(?: +"[^"\\n]{0,200}")?\\)`, "iy");
const BARE_URL = new RegExp(`https?://${URL_PART}`, "iy");
const ESCAPED = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const SPACE = /\s/;

/** The blocks of a text. */
export function parse(text) {
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = (depth < MAX_DEPTH && special(lines, at, depth)) || paragraph(lines, at);
    found.push(block);
    at = next;
  }
  return found;
}

/** The block that starts at a line and the line after it; null for a paragraph. */
function special(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const title = (heading[2] ?? "").replace(/ +#+ *$/, "");
    return [{ tag: `h${heading[1].length}`, children: inline(title) }, at + 1];
  }
  if (RULE.test(line)) return [{ tag: "hr", children: [] }, at + 1];
  if (QUOTE.test(line)) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    const inner = lines.slice(at, end).map((one) => one.replace(QUOTE, ""));
    return [{ tag: "blockquote", children: blocks(inner, depth + 1) }, end];
  }
  if (ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return null;
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return [{ tag: "p", children: inline(text) }, end];
}

function interrupts(lines, at) {
  const line = lines[at];
  const marks = [FENCE, HEADING, RULE, QUOTE, ITEM];
  return marks.some((mark) => mark.test(line)) || isTable(lines, at);
}

function code(lines, at, [, indent, fence, language]) {
  const isEnd = (line) => {
    const trimmed = line.trim();
    return trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length);
  };
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map((line) => outdent(line, indent.length)).join("\n");
  return [{ tag: "pre", language: language.trim(), children: [text] }, end + 1];
}

function list(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const isOrdered = marker.length > 1;
  const kind = marker.at(-1);
  const items = [];
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    const isNext = match && match[2].at(-1) === kind && width(lines[at]) < indent.length + 2;
    if (!isNext || RULE.test(lines[at])) break;
    const [own, next] = item(lines, at, match);
    items.push({ tag: "li", children: tightened(blocks(own, depth + 1)) });
    at = next;
  }
  const children = items;
  if (isOrdered) return [{ tag: "ol", start: parseInt(marker, 10), children }, at];
  return [{ tag: "ul", children }, at];
}

/** The lines of an item without their indentation, and the line after it. */
function item(lines, at, [whole, indent]) {
  const own = [lines[at].slice(whole.length)];
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    const isDeeper = width(line) >= indent.length + 2;
    if (!line.trim()) {
      // Blank lines belong to the item if something of it follows, and to the list in any case.
      own.push("");
    } else if (isDeeper) {
      own.push(outdent(line, Math.max(whole.length, indent.length + 2)));
    } else if (lines[end - 1].trim() && !interrupts(lines, end)) {
      own.push(line.trim());
    } else {
      break;
    }
    end += 1;
  }
  return [own, end];
}

/** Of an item with one paragraph at its start, the paragraph's text alone. */
function tightened(children) {
  if (children[0]?.tag !== "p" || children[1]?.tag === "p") return children;
  return [...children[0].children, ...children.slice(1)];
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return false;
  const rule = cells(lines[at + 1]);
  return rule.length === cells(lines[at]).length && rule.every((cell) => CELL.test(cell));
}

function table(lines, at) {
  const row = (tag, line) => ({
    tag: "tr",
    children: cells(line).map((cell) => ({ tag, children: inline(cell) })),
  });
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row("td", line));
  const children = [{ tag: "thead", children: [row("th", lines[at])] }];
  if (body.length) children.push({ tag: "tbody", children: body });
  return [{ tag: "table", children }, end];
}

function cells(line) {
  const trimmed = line.trim().replace(/^\|/, "").replace(/([^\\]|^)\|$/, "$1");
  return trimmed.split(/(?<!\\)\|/).map((cell) => cell.trim());
}

function width(line) {
  return line.length - line.trimStart().length;
}

function outdent(line, count) {
  return line.slice(Math.min(width(line), count));
}

/** Looks up marks in a text; each position is passed once per mark. */
class Marks {
  constructor(text) {
    this.text = text;
    this.cache = new Map();
  }

  /** The first position of a mark from `start` on at which `isValid`; -1 for none. */
  next(mark, start, isValid = () => true) {
    const [from, at] = this.cache.get(mark) ?? [0, 0];
    if (from <= start && (at === -1 || at > start)) return at;
    let found = this.text.indexOf(mark, start);
    while (found !== -1 && !isValid(found)) found = this.text.indexOf(mark, found + 1);
    this.cache.set(mark, [start, found]);
    return found;
  }
}

function inline(text, depth = 0) {
  if (depth >= MAX_DEPTH) return text ? [text] : [];
  const marks = new Marks(text);
  const found = [];
  let plain = "";
  let at = 0;
  while (at < text.length) {
    const span = SPANS[text[at]]?.(text, at, marks, depth);
    if (!span) {
      plain += text[at];
      at += 1;
      continue;
    }
    if (plain) found.push(plain);
    plain = "";
    found.push(span[0]);
    at = span[1];
  }
  if (plain) found.push(plain);
  return found;
}

// By their first character: [node, position after it], or null if it is plain text.
const SPANS = {
  "\\": (text, at) => (ESCAPED.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : null),
  "`": codeSpan,
  "*": emphasis,
  _: emphasis,
  "~": (text, at, marks, depth) => delimited("del", "~~", text, at, marks, depth),
  "[": link,
  "!": (text, at, marks, depth) => (text[at + 1] === "[" ? link(text, at + 1, marks, depth) : null),
  h: bareUrl,
  H: bareUrl,
};

function codeSpan(text, at, marks) {
  let end = at;
  while (text[end] === "`") end += 1;
  const mark = text.slice(at, end);
  const isWhole = (one) => text[one - 1] !== "`" && text[one + mark.length] !== "`";
  const close = mark.length > 16 ? -1 : marks.next(mark, end, isWhole);
  if (close === -1) return [mark, end];
  const inner = text.slice(end, close);
  const isPadded = inner.trim() && inner.startsWith(" ") && inner.endsWith(" ");
  return [{ tag: "code", children: [isPadded ? inner.slice(1, -1) : inner] }, close + mark.length];
}

function emphasis(text, at, marks, depth) {
  const mark = text[at];
  let end = at;
  while (text[end] === mark) end += 1;
  if (end - at > 3) return [text.slice(at, end), end];
  if (end - at === 3) {
    const strong = delimited("strong", mark.repeat(3), text, at, marks, depth);
    return strong && [{ tag: "em", children: [strong[0]] }, strong[1]];
  }
  const tag = end - at === 2 ? "strong" : "em";
  return delimited(tag, mark.repeat(end - at), text, at, marks, depth);
}

function delimited(tag, mark, text, at, marks, depth) {
  const start = at + mark.length;
  if (!text.startsWith(mark, at) || SPACE.test(text[start] ?? " ")) return null;
  const isWord = (one) => WORD.test(text[one] ?? "");
  if (mark[0] === "_" && isWord(at - 1)) return null;
  const isClose = (one) => {
    const after = one + mark.length;
    const isRun = text[one - 1] !== mark[0] && text[after] !== mark[0];
    return isRun && !SPACE.test(text[one - 1] ?? " ") && !(mark[0] === "_" && isWord(after));
  };
  const close = marks.next(mark, start, isClose);
  if (close <= start) return null;
  return [{ tag, children: inline(text.slice(start, close), depth + 1) }, close + mark.length];
}

function link(text, at, marks, depth) {
  const close = marks.next("](", at + 1);
  if (close === -1) return null;
  LINK_TARGET.lastIndex = close;
  const match = LINK_TARGET.exec(text);
  const label = text.slice(at + 1, close);
  if (!match || !label.trim() || label.includes("[")) return null;
  const children = inline(label, MAX_DEPTH - 1).map(withoutLinks);
  return [{ tag: "a", href: match[1], children }, close + match[0].length];
}

function withoutLinks(node) {
  return node.tag === "a" ? node.children.join("") : node;
}

function bareUrl(text, at) {
  if (WORD.test(text[at - 1] ?? "")) return null;
  BARE_URL.lastIndex = at;
  const match = BARE_URL.exec(text);
  if (!match) return null;
  const href = match[0].replace(/[.,:;!?'*_~\]]+$/, "");
  return href.length > "https://".length ? [{ tag: "a", href, children: [href] }, at + href.length] : null;
}

/** A DOM node of a node. `h1` becomes `h3` and so on, below the headings of the page. */
export function render(node, copy) {
  if (typeof node === "string") return document.createTextNode(node);
  if (node.tag === "pre") return codeBlock(node, copy);
  const tag = node.tag.replace(/^h(\d)$/, (_, level) => `h${Math.min(6, Number(level) + 2)}`);
  const element = document.createElement(tag);
  if (node.tag === "a") {
    element.href = node.href;
    element.title = node.href;
    element.target = "_blank";
    element.rel = "noopener noreferrer";
  }
  if (node.tag === "ol" && node.start !== 1) element.start = node.start;
  element.append(...node.children.map((child) => render(child, copy)));
  if (node.tag !== "table") return element;
  const frame = document.createElement("div");
  frame.className = "table";
  frame.tabIndex = 0;
  frame.append(element);
  return frame;
}

function codeBlock({ language, children: [text] }, copy) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = language || "text";
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy code");
  button.addEventListener("click", () => copy(text, button));
  caption.append(name, button);
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  const body = document.createElement("code");
  body.textContent = text;
  pre.append(body);
  figure.append(caption, pre);
  return figure;
}

/** Replaces the contents of an element; blocks that have not changed stay, with their focus. */
export function show(element, text, copy) {
  const found = parse(text);
  const keys = found.map((block) => JSON.stringify(block));
  const former = element.blockKeys ?? [];
  let same = 0;
  while (same < keys.length && keys[same] === former[same]) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...found.slice(same).map((block) => render(block, copy)));
  element.blockKeys = keys;
}
