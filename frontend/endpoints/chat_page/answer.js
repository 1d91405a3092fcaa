// One answer: what has arrived of it, and its view.
import { renderMarkdown } from "/page/markdown.js";

// label tells answers apart that have different settings.
export function newAnswer(isJson, label) {
  return { content: "", reasoning: "", calls: [], tokens: [], finish: null, failure: null, isJson, label, stats: null };
}

// Adds a chunk's choice to the answer.
export function extend(answer, choice) {
  const delta = choice.delta ?? {};
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const call of delta.tool_calls ?? []) {
    const known = (answer.calls[call.index] ??= { id: call.id, name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  for (const entry of choice.logprobs?.content ?? []) {
    const top = entry.top_logprobs.map((each) => [each.token, each.logprob]);
    answer.tokens.push({ token: entry.token, logprob: entry.logprob, top });
  }
  answer.finish = choice.finish_reason ?? answer.finish;
}

// The answer as a message of the next request.
export function toMessage(answer) {
  const message = { role: "assistant", content: answer.content };
  if (answer.calls.length) {
    message.tool_calls = answer.calls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
  }
  return message;
}

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function percent(logprob) {
  return `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

function alternatives({ logprob, top }, separator) {
  return [percent(logprob), ...top.map(([other, its]) => `${JSON.stringify(other)} ${percent(its)}`)].join(separator);
}

// Tokens as shades. Hovering shows a token's alternatives, and so does choosing it by a click, a touch or the arrow keys.
class TokenShades {
  constructor(tokens) {
    this.tokens = tokens;
    this.chosen = -1;
    this.shades = element("div", "body tokens");
    this.shades.tabIndex = 0;
    this.shades.setAttribute("role", "group");
    this.shades.setAttribute("aria-label", "Tokens: the arrow keys show alternatives");
    this.shades.addEventListener("click", ({ target }) => this.choose([...this.shades.children].indexOf(target)));
    this.shades.addEventListener("keydown", (event) => {
      const next = { ArrowLeft: this.chosen - 1, ArrowRight: this.chosen + 1, Home: 0, End: this.tokens.length - 1 }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      this.choose(Math.max(0, Math.min(next, this.tokens.length - 1)));
    });
    this.detail = element("p", "alternatives");
    this.detail.setAttribute("role", "status");
    this.node = element("div", "", this.shades, this.detail);
  }

  choose(index) {
    this.shades.children[this.chosen]?.classList.remove("chosen");
    this.chosen = index;
    this.shades.children[index]?.classList.add("chosen");
    const token = this.tokens[index];
    this.detail.textContent = token ? `${JSON.stringify(token.token)}: ${alternatives(token, " · ")}` : "";
  }

  // Draws the tokens that have come since.
  draw() {
    for (const token of this.tokens.slice(this.shades.childElementCount)) {
      const shade = element("span", "", token.token);
      shade.style.setProperty("--doubt", `${Math.round(60 * (1 - Math.exp(token.logprob)))}%`);
      shade.title = alternatives(token, "\n");
      this.shades.append(shade);
    }
  }
}

function jsonMark(content) {
  try {
    JSON.parse(content);
    return element("span", "mark", "valid JSON ✓");
  } catch {
    return element("span", "mark bad", "not valid JSON ✗");
  }
}

export class AnswerView {
  constructor(answer) {
    this.answer = answer;
    this.reasoning = element("details", "reasoning", element("summary", "", "Reasoning"), element("div", "body"));
    this.body = element("div", "body");
    this.calls = element("div", "calls");
    this.stats = element("p", "stats");
    this.shades = null; // once the answer has log probabilities
    const label = answer.label ? [element("p", "label", answer.label)] : [];
    this.node = element("article", "answer", ...label, this.reasoning, this.body, this.calls, this.stats);
    this.isQueued = false;
    this.draw();
  }

  // Draws once in the next frame, however many chunks arrive before it.
  drawSoon() {
    if (this.isQueued) return;
    this.isQueued = true;
    requestAnimationFrame(() => {
      this.isQueued = false;
      this.draw();
    });
  }

  draw() {
    const { content, reasoning, calls, tokens, finish, failure, isJson, stats } = this.answer;
    this.reasoning.hidden = !reasoning;
    this.reasoning.lastChild.replaceChildren(renderMarkdown(reasoning));
    if (tokens.length) {
      if (!this.shades) {
        this.shades = new TokenShades(tokens);
        this.body.replaceWith(this.shades.node);
      }
      this.shades.draw();
    } else if (isJson) {
      this.body.replaceChildren(element("pre", "", content));
    } else {
      this.body.replaceChildren(renderMarkdown(content));
    }
    this.calls.replaceChildren(
      ...calls.map((call) => element("pre", "", element("code", "", `${call.name}(${call.arguments})`))));
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
