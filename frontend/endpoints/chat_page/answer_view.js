// The view of one answer.
import { copyText } from "/page/code_and_math.js";
import { button, element } from "/page/elements.js";
import { MarkdownView } from "/page/markdown.js";
import { canRead, readAloud } from "/page/read_aloud.js";
import { TokenShades } from "/page/token_shades.js";

function jsonMark(content) {
  try {
    JSON.parse(content);
    return element("span", "mark", "valid JSON ✓");
  } catch {
    return element("span", "mark bad", "not valid JSON ✗");
  }
}

export class AnswerView {
  // onWhy is called when the reader wants to know how the answer came about.
  constructor(answer, onWhy) {
    this.reasoning = element("details", "reasoning", element("summary", "", "Reasoning"), element("div", "body"));
    this.reasoningText = new MarkdownView(this.reasoning.lastChild);
    this.body = element("div", "body");
    this.text = new MarkdownView(this.body);
    this.calls = element("div", "calls");
    this.stats = element("p", "stats");
    const copy = button("Copy", "Copy this answer", () => copyText(this.answer.content, copy));
    const read = button("Read aloud", "", () => readAloud(this.shades?.node ?? this.body, read));
    this.tools = element("div", "tools", copy, ...(canRead ? [read] : []), button("Why?", "How this answer came about", onWhy));
    this.shades = null; // once the answer has log probabilities
    this.pre = null; // of an answer that is JSON
    const label = answer.label ? [element("p", "label", answer.label)] : [];
    this.node = element("article", "answer", ...label, this.reasoning, this.body, this.calls, this.stats, this.tools);
    this.draw(answer);
  }

  draw(answer) {
    this.answer = answer;
    const { content, reasoning, calls, tokens, finish, failure, isJson, stats } = answer;
    this.reasoning.hidden = !reasoning;
    this.reasoningText.draw(reasoning, Boolean(stats));
    if (tokens.length) {
      this.shades ??= new TokenShades(tokens);
      this.body.replaceWith(this.shades.node);
      this.shades.draw(tokens);
    } else if (isJson) {
      this.pre ??= this.body.appendChild(element("pre", ""));
      this.pre.textContent = content;
    } else {
      this.text.draw(content, Boolean(stats));
    }
    this.calls.replaceChildren(
      ...calls.map((call) => element("pre", "", element("code", "", `${call.name}(${call.arguments})`))));
    this.tools.hidden = !stats;
    const parts = [];
    if (failure) parts.push(element("span", "failure", failure));
    if (finish && isJson) parts.push(jsonMark(content));
    if (finish === "length") parts.push("cut at its limit of tokens");
    if (stats) parts.push(...describe(stats));
    this.stats.replaceChildren(...parts.flatMap((part, index) => (index ? [" · ", part] : [part])));
  }
}

function describe({ ttftMs, tokensPerS, promptTokens, cachedTokens, completionTokens, isCoalesced }) {
  const parts = [];
  if (ttftMs !== null) parts.push(`first token after ${Math.round(ttftMs)} ms`);
  if (tokensPerS !== null) parts.push(`${tokensPerS.toFixed(1)} tokens/s`);
  if (promptTokens !== null) parts.push(`${promptTokens} prompt tokens, ${cachedTokens} cached`);
  if (completionTokens) parts.push(`${completionTokens} tokens${isCoalesced ? ", coalesced" : ""}`);
  return parts;
}
