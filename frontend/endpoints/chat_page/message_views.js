// Views of messages: what was asked, the answers to it, and results of tools.
import { AnswerView } from "/page/answer_view.js";
import { button, element } from "/page/elements.js";
import { pictureView } from "/page/pictures.js";
import { isRunning, noticeOf } from "/page/streams.js";
import { siblings } from "/page/tree.js";

const DRAW_EVERY_MS = 30; // the model may need the same cores

// Buttons to the message's branches, if it has some.
function branches(conversation, message, onShow) {
  const all = siblings(conversation, message);
  if (all.length < 2) return [];
  const place = all.indexOf(message);
  const step = (text, label, other) => {
    const made = button(text, label, () => onShow(other));
    made.disabled = !other;
    return made;
  };
  return [element("span", "branches", step("‹", "Earlier branch", all[place - 1]), ` ${place + 1} of ${all.length} `,
    step("›", "Later branch", all[place + 1]))];
}

function textFile({ name, text }) {
  const shown = element("pre", "", text);
  shown.tabIndex = 0; // it may scroll
  return element("details", "file", element("summary", "", `${name}, ${text.length.toLocaleString("en")} characters`), shown);
}

function pictureButton(file) {
  const made = button("", "", () => made.setAttribute("aria-expanded", String(made.getAttribute("aria-expanded") === "false")));
  made.className = "picture";
  made.setAttribute("aria-expanded", "false");
  made.append(pictureView(file));
  return made;
}

export function userView(conversation, message, actions) {
  const files = (message.files ?? []).map((file) => (file.blob ? pictureButton(file) : textFile(file)));
  const text = message.content ? [element("div", "text", message.content)] : [];
  const tools = element("div", "tools", ...branches(conversation, message, actions.show),
    button("Edit and send again", "", () => actions.edit(message)));
  return { message, draw: () => null,
    node: element("div", "message user", element("h2", "", "You"), ...text, ...files, tools) };
}

export function toolView(message) {
  return { message, draw: () => null,
    node: element("div", "message user", element("h2", "", `Result of ${message.name}`), element("div", "text", message.content)) };
}

export class AnswersView {
  constructor(conversation, message, actions) {
    this.conversation = conversation;
    this.message = message;
    this.actions = actions;
    this.notice = element("p", "waiting");
    this.notice.setAttribute("role", "status");
    this.retry = button("Retry", "", () => actions.retry(message));
    this.tools = element("div", "tools");
    this.results = element("form", "results");
    this.views = message.answers.map((answer, index) => new AnswerView(answer, () => actions.why(message, index)));
    if (this.views.length > 1) {
      this.views.forEach((view, index) => view.tools.append(button("Continue with this one", "", () => actions.choose(message, index))));
    }
    this.node = element("div", "message", element("h2", "", message.model ?? "Model"),
      element("div", "answers", ...this.views.map((view) => view.node)), this.results, this.notice, this.tools);
    this.drawNow();
  }

  // Draws what has changed since, however many chunks arrive before that.
  draw() {
    if (this.isQueued) return;
    this.isQueued = true;
    setTimeout(() => requestAnimationFrame(() => this.drawNow()), this.drawnMs + DRAW_EVERY_MS - performance.now());
  }

  drawNow() {
    this.isQueued = false;
    this.drawnMs = performance.now();
    this.views.forEach((view, index) => {
      view.node.classList.toggle("chosen", this.views.length > 1 && index === this.message.chosen);
      view.draw(this.message.answers[index]);
    });
    const notice = noticeOf(this.message);
    const isIdle = !isRunning(this.message);
    this.notice.textContent = notice ?? "";
    this.notice.hidden = !notice;
    this.drawTools(isIdle, notice);
    this.drawResults(isIdle);
  }

  drawTools(isIdle, notice) {
    const hasFailed = this.message.requests.some((each) => each.state === "failed");
    const chosen = this.message.answers[this.message.chosen];
    const canRetry = isIdle ? hasFailed : notice !== null;
    const isCut = chosen.finish === "length" || chosen.failure !== null;
    const canContinue = isIdle && chosen.content !== "" && !chosen.calls.length && isCut;
    const wanted = [siblings(this.conversation, this.message).length, canRetry, isIdle, canContinue].join();
    if (wanted === this.shownTools) return; // a button that is made anew loses the focus
    this.shownTools = wanted;
    const buttons = [...branches(this.conversation, this.message, this.actions.show)];
    if (canRetry) buttons.push(this.retry);
    if (isIdle) buttons.push(button("Regenerate", "", () => this.actions.regenerate(this.message)));
    if (canContinue) buttons.push(button("Continue", "", () => this.actions.goOn(this.message)));
    this.tools.replaceChildren(...buttons);
  }

  // A field for each call's result, while no message follows the calls.
  drawResults(isIdle) {
    const { calls } = this.message.answers[this.message.chosen];
    const isWanted = isIdle && calls.length > 0 && this.conversation.leaf === this.message.id;
    if (!isWanted) this.results.replaceChildren();
    if (!isWanted || this.results.childElementCount) return;
    const fields = calls.map((call) => element("textarea", ""));
    calls.forEach((call, index) => this.results.append(element("label", "", `Result of ${call.name}`, fields[index])));
    this.results.append(element("button", "", "Send results"));
    this.results.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.sendResults(this.message, fields.map((field) => field.value));
    });
  }
}
