// Markdown as safe elements: marked writes HTML, and DOMPurify removes all that could run or load anything.
import { Marked } from "/page/vendor/marked.js";
import DOMPurify from "/page/vendor/purify.js";
import { element } from "/page/elements.js";
import { adorn } from "/page/code_and_math.js";

const RULES = {
  USE_PROFILES: { html: true },
  FORBID_TAGS: ["style", "form", "input", "button", "textarea", "select", "img", "picture", "video", "audio", "svg", "math"],
  FORBID_ATTR: ["style", "id", "name", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["align", "colspan", "rowspan", "start", "dir", "lang"], // otherwise they would have to be addresses
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("rel", "noopener noreferrer");
    node.setAttribute("target", "_blank");
  }
});

const escape = (text) => text.replace(/[&<>"]/g, (each) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[each]);

// Formulas between \[ \], $$ $$, \( \) and $ $. A dollar before a digit or a space is money.
function formula(level, starts, rule) {
  const name = `${level}Formula`;
  return {
    name,
    level,
    start: (text) => text.match(starts)?.index,
    tokenizer(text) {
      const found = rule.exec(text);
      return found ? { type: name, raw: found[0], text: found.slice(1).find((each) => each !== undefined) } : undefined;
    },
    renderer: ({ raw, text }) => {
      const isBlock = raw.startsWith("$$") || raw.startsWith("\\[");
      return `<span data-math="${isBlock ? "block" : "inline"}">${escape(text)}</span>`;
    },
  };
}

const marked = new Marked({
  gfm: true,
  async: false,
  extensions: [
    formula("block", /(?:^|\n) {0,3}(?:\$\$|\\\[)/, /^ {0,3}(?:\$\$([^$]+?)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n|$)/),
    formula("inline", /\$|\\[([]/, /^(?:\$\$([^$]+?)\$\$|\\\[([^]+?)\\\]|\\\(([^]+?)\\\)|\$(?![\s\d$])([^$\n]*?[^\s$\\])\$(?!\d))/),
  ],
  renderer: {
    code: ({ text, lang }) => `<pre data-code="${escape((lang ?? "").split(/\s/)[0])}"><code>${escape(text)}\n</code></pre>\n`,
    checkbox: ({ checked }) => `<span data-task="${checked ? "done" : "open"}" role="img" aria-label="${checked ? "done" : "open"}"></span> `,
  },
});

function safe(html) {
  return DOMPurify.sanitize(html, RULES);
}

const PART_CHARACTERS = 2_000;

// A text that grows. Blocks that nothing can change any more are drawn once; only the last one is parsed again. They are in
// parts, and the browser lays out and paints only the parts in sight.
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.clear();
  }

  clear() {
    this.settled = ""; // the text of all blocks before the last one
    this.links = Object.create(null); // definitions of links that have come
    this.shown = null;
    this.part = null;
    this.partCharacters = 0;
    this.rest = element("div", "rest"); // the last block
    this.node.replaceChildren(this.rest);
  }

  draw(raw, hasEnded) {
    const text = raw.replace(/\r\n?/g, "\n");
    if (this.shown === `${hasEnded} ${text.length}` && text.startsWith(this.settled)) return;
    if (!text.startsWith(this.settled)) this.clear();
    this.shown = `${hasEnded} ${text.length}`;
    const blocks = this.parse(text.slice(this.settled.length));
    let last = blocks.length - 1;
    while (last > 0 && blocks[last].type === "space") last -= 1;
    const settled = hasEnded ? blocks : blocks.slice(0, last);
    for (const block of settled) this.settle(block);
    this.drawRest(hasEnded ? [] : blocks.slice(last));
  }

  parse(text) {
    const lexer = new marked.Lexer({ ...marked.defaults });
    Object.assign(lexer.tokens.links, this.links);
    const blocks = lexer.lex(text);
    this.links = blocks.links;
    return blocks;
  }

  render(blocks) {
    return safe(marked.parser(blocks));
  }

  settle(block) {
    if (!this.part || this.partCharacters > PART_CHARACTERS) {
      this.part = element("div", "part");
      this.partCharacters = 0;
      this.rest.before(this.part);
    }
    const made = this.render([block]);
    adorn(made);
    this.part.append(made);
    this.partCharacters += block.raw.length;
    this.settled += block.raw;
  }

  // A long block of code that grows is not made anew.
  drawRest(blocks) {
    const code = blocks.length && blocks[0].type === "code" ? this.rest.querySelector(":scope > pre > code") : null;
    if (code && this.restBegan === blocks[0].lang) code.textContent = blocks[0].text;
    else this.rest.replaceChildren(...(blocks.length ? [this.render(blocks)] : []));
    this.restBegan = blocks[0]?.type === "code" ? blocks[0].lang : undefined;
  }
}
