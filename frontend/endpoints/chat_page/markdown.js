// Markdown as safe elements: marked writes HTML, and DOMPurify removes all that could run or load anything.
import { marked } from "/page/vendor/marked.js";
import DOMPurify from "/page/vendor/purify.js";

const RULES = {
  USE_PROFILES: { html: true },
  FORBID_TAGS: ["style", "form", "input", "button", "textarea", "select", "img", "picture", "video", "audio", "svg", "math"],
  FORBID_ATTR: ["style", "id", "name", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("rel", "noopener noreferrer");
    node.setAttribute("target", "_blank");
  }
});

export function renderMarkdown(text) {
  return DOMPurify.sanitize(marked.parse(text, { async: false, gfm: true }), RULES);
}
