// Tokens as shades: the less likely, the darker. Hovering shows a token's alternatives, and so does choosing it by a click, a
// touch or the arrow keys.
import { element } from "/page/elements.js";

function percent(logprob) {
  return `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

function alternatives({ logprob, top }, separator) {
  return [percent(logprob), ...top.map(([other, its]) => `${JSON.stringify(other)} ${percent(its)}`)].join(separator);
}

export class TokenShades {
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
    this.draw(tokens);
  }

  choose(index) {
    this.shades.children[this.chosen]?.classList.remove("chosen");
    this.chosen = index;
    this.shades.children[index]?.classList.add("chosen");
    const token = this.tokens[index];
    this.detail.textContent = token ? `${JSON.stringify(token.token)}: ${alternatives(token, " · ")}` : "";
  }

  // Draws the tokens that have come since.
  draw(tokens) {
    this.tokens = tokens;
    if (tokens.length < this.shades.childElementCount) this.shades.replaceChildren();
    for (const token of tokens.slice(this.shades.childElementCount)) {
      const shade = element("span", "", token.token);
      shade.style.setProperty("--doubt", `${Math.round(60 * (1 - Math.exp(token.logprob)))}%`);
      shade.title = alternatives(token, "\n");
      this.shades.append(shade);
    }
  }
}
