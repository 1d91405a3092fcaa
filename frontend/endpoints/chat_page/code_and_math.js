// What sanitized Markdown gets besides: buttons to copy code, its colours, and formulas. Both libraries load when a text
// first needs them. KaTeX makes MathML elements, which need no fonts and no styles.
import DOMPurify from "/page/vendor/purify.js";
import { button, element } from "/page/elements.js";

const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
const MOST_COLOURED = 100_000; // characters

let loading = {};

function load(name) {
  loading[name] ??= import(`/page/vendor/${name}.js`).then((module) => module.default ?? globalThis[name]);
  return loading[name];
}

// Adorns blocks that nothing changes any more.
export function adorn(fragment) {
  for (const pre of fragment.querySelectorAll("pre[data-code]")) adornCode(pre);
  const formulas = [...fragment.querySelectorAll("span[data-math]")];
  if (formulas.length) load("katex").then((katex) => formulas.forEach((each) => drawFormula(katex, each)));
}

function adornCode(pre) {
  const language = pre.dataset.code;
  const code = pre.firstElementChild;
  const text = code.textContent;
  pre.tabIndex = 0; // it may scroll
  const copy = button("Copy", `Copy this code`, () => copyText(text, copy));
  const bar = element("div", "code-bar", element("span", "", language), copy);
  pre.before(bar);
  if (!language || text.length > MOST_COLOURED) return;
  load("highlight").then((highlight) => {
    if (!highlight.getLanguage(language)) return;
    const { value } = highlight.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(DOMPurify.sanitize(value, COLOURS));
  });
}

function drawFormula(katex, node) {
  const text = node.textContent;
  try {
    katex.render(text, node, { displayMode: node.dataset.math === "block", output: "mathml", throwOnError: true, maxExpand: 200 });
  } catch {
    node.replaceChildren(element("code", "", text)); // it is no formula that KaTeX knows
  }
}

export async function copyText(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not allowed, as in a page that came over plain HTTP
    const area = element("textarea", "hidden");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    from.focus();
  }
  const before = from.textContent;
  from.textContent = "Copied";
  setTimeout(() => (from.textContent = before), 1500);
}
