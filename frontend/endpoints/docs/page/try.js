// The form that tries an endpoint: sends what is in it, and shows status, headers and answer as they arrive.
import { send } from "/page/api.js";
import { element } from "/docs/element.js";

const MOST_CHARACTERS = 200_000; // of an answer that are shown
const NOT_SHOWN = new Set(["cache-control", "connection", "content-length", "content-security-policy", "date",
  "referrer-policy", "transfer-encoding", "vary", "x-accel-buffering", "x-content-type-options"]);
const NOT_TRIED = {
  "/v1/responses": "This page sends a request over HTTP. The same path takes an upgrade to a WebSocket, which is not tried here.",
};

// Sent requests, and their answers

function fullPath(path, fields) {
  const query = new URLSearchParams();
  let full = path;
  for (const { parameter, input } of fields) {
    if (parameter.in === "path") full = full.replace(`{${parameter.name}}`, encodeURIComponent(input.value).replaceAll("%2F", "/"));
    if (parameter.in === "query" && input.value !== "") query.set(parameter.name, input.value);
  }
  return query.size ? `${full}?${query}` : full;
}

function readable(text, contentType) {
  if (!contentType.startsWith("application/json")) return text;
  try {
    const lines = JSON.stringify(JSON.parse(text), null, 2);
    // Vectors stay on one line. A string has no line break as such, so none of them matches.
    return lines.replace(/\[\n[-+\d.eE,\s]+\]/g, (list) => list.replace(/\s+/g, " "));
  } catch {
    return text;
  }
}

// What an event adds to the text of the first answer, in any of the APIs.
function addedText(data) {
  if (data.choices) {
    const first = data.choices.find((choice) => choice.index === 0);
    return first?.delta?.content ?? first?.text ?? "";
  }
  if (data.type === "response.output_text.delta") return data.delta;
  return data.type === "content_block_delta" ? data.delta.text ?? "" : "";
}

function textOf(event) {
  const data = event.split("\n").find((line) => line.startsWith("data: {"));
  try {
    return data ? addedText(JSON.parse(data.slice(6))) : "";
  } catch {
    return ""; // the event itself is shown, whatever is in it
  }
}

// Shows the end of a text that grows: the rest would fill the browser's memory.
class Output {
  constructor(node) {
    this.node = node;
    this.size = 0;
    this.dropped = 0;
  }

  clear() {
    this.node.replaceChildren();
    this.node.hidden = true;
    this.size = this.dropped = 0;
  }

  add(text) {
    if (!text) return;
    const { node } = this;
    const follows = node.scrollTop + node.clientHeight >= node.scrollHeight - 20;
    node.append(text.slice(-MOST_CHARACTERS));
    node.hidden = false;
    this.size += text.length;
    this.dropped += Math.max(0, text.length - MOST_CHARACTERS);
    while (this.size - this.dropped > MOST_CHARACTERS) {
      this.dropped += node.firstChild.length;
      node.firstChild.remove();
    }
    if (follows) node.scrollTop = node.scrollHeight;
  }
}

export class TryForm {
  // model is the name for the examples, "" if it is unknown; onRefused is called when the server wants another key.
  constructor(path, method, operation, components, model, onRefused) {
    Object.assign(this, { path, method: method.toUpperCase(), onRefused, stopper: null });
    this.fields = (operation.parameters ?? []).map((parameter) => parameterField(parameter, model));
    const content = operation.requestBody?.content["application/json"];
    this.body = content ? element("textarea", { spellcheck: "false", autocapitalize: "off" }) : null;
    this.status = element("p", { class: "status", role: "status" });
    this.headers = element("dl", { class: "headers" });
    this.text = new Output(element("div", { class: "text output", tabindex: "0", role: "region", "aria-label": "Text of the answer" }));
    this.answer = new Output(element("pre", { class: "output", tabindex: "0", role: "region", "aria-label": "Answer" }));
    this.sendButton = element("button", {}, "Send");
    this.stopButton = element("button", { type: "button" }, "Stop");
    this.node = element("form", { class: "try", autocomplete: "off", "aria-label": `Try ${this.method} ${path}` }, element("h3", {}, "Try it"));
    if (NOT_TRIED[path] && method === "post") this.node.append(element("p", {}, NOT_TRIED[path]));
    this.addParameters();
    const streams = "text/event-stream" in operation.responses["200"].content;
    if (this.body) this.addBody(content.schema, (name) => exampleOf(components[name], model, streams));
    this.node.append(element("div", { class: "row" }, this.sendButton, this.stopButton), this.status, this.headers, this.text.node, this.answer.node);
    this.clear();
    this.showRunning(false);
    this.listen();
  }

  addParameters() {
    const labels = (wanted) => this.fields.filter(({ parameter }) => (parameter.in === "header") === wanted).map(({ label }) => label);
    if (labels(false).length) this.node.append(element("div", { class: "parameters" }, ...labels(false)));
    if (labels(true).length) {
      this.node.append(element("details", {}, element("summary", {}, "Headers"), element("div", { class: "parameters" }, ...labels(true))));
    }
  }

  addBody(schema, example) {
    const names = (schema.anyOf ?? [schema]).map((each) => each.$ref.split("/").pop());
    const show = (name) => {
      this.body.value = JSON.stringify(example(name), null, 2);
      this.body.rows = Math.min(24, this.body.value.split("\n").length + 1);
    };
    if (names.length > 1) {
      const choice = element("select", {}, ...names.map((name) => element("option", {}, name)));
      choice.addEventListener("change", () => show(choice.value));
      this.node.append(element("label", {}, "Example ", choice));
    }
    show(names[0]);
    this.node.append(element("label", {}, "Body", this.body));
  }

  listen() {
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.node.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stopper?.abort();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.node.requestSubmit(this.sendButton);
    });
    this.stopButton.addEventListener("click", () => this.stopper?.abort());
  }

  clear() {
    this.status.textContent = "";
    this.status.className = "status";
    this.headers.replaceChildren();
    this.text.clear();
    this.answer.clear();
  }

  showRunning(isRunning) {
    if (isRunning && document.activeElement === this.sendButton) {
      this.stopButton.hidden = false;
      this.stopButton.focus();
    } else if (!isRunning && document.activeElement === this.stopButton) {
      this.sendButton.hidden = false;
      this.sendButton.focus();
    }
    this.sendButton.hidden = isRunning;
    this.stopButton.hidden = !isRunning;
  }

  async run() {
    if (this.stopper) return;
    this.clear();
    this.stopper = new AbortController();
    this.showRunning(true);
    this.startedMs = performance.now();
    let head = "";
    try {
      const answer = await this.send();
      head = this.showHead(answer);
      const counted = await this.showContent(answer, head);
      this.status.textContent = `${head} · ended after ${this.elapsed()}${counted}`;
      if (answer.status === 401) this.onRefused();
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.status.textContent = [head, stopped ? `stopped after ${this.elapsed()}` : `no answer: ${error.message}`].filter(Boolean).join(" · ");
      this.status.classList.toggle("bad", !stopped);
    }
    this.stopper = null;
    this.showRunning(false);
  }

  elapsed() {
    return `${Math.round(performance.now() - this.startedMs)} ms`;
  }

  send() {
    const headers = {};
    for (const { parameter, input } of this.fields) {
      if (parameter.in === "header" && input.value !== "") headers[parameter.name] = input.value;
    }
    const { method, stopper: { signal } } = this;
    return send(fullPath(this.path, this.fields), { method, headers, signal, body: this.body?.value });
  }

  // Shows status and headers; returns the words for the status.
  showHead(answer) {
    const head = `${answer.status} ${answer.statusText}`.trim() + (answer.status === 401 ? ": the API key is missing or wrong" : "");
    this.status.textContent = `${head} after ${this.elapsed()} …`;
    this.status.classList.toggle("bad", !answer.ok);
    for (const [name, value] of answer.headers) {
      if (!NOT_SHOWN.has(name)) this.headers.append(element("dt", {}, element("code", {}, name)), element("dd", {}, element("code", {}, value)));
    }
    return head;
  }

  // Returns words for the end of the status.
  async showContent(answer, head) {
    const contentType = answer.headers.get("content-type") ?? "";
    if (!contentType.startsWith("text/event-stream")) {
      this.answer.add(readable(await answer.text(), contentType));
      return this.left();
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let count = 0;
    let rest = "";
    let first = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      if (!events.length) continue;
      first ||= `, first event after ${this.elapsed()}`;
      count += events.length;
      this.text.add(events.map(textOf).join(""));
      this.answer.add(events.map((event) => `${event}\n\n`).join(""));
      this.status.textContent = `${head}${first}, ${count} events …`;
    }
    this.answer.add(rest);
    return `${first}, ${count} events${this.left()}`;
  }

  left() {
    return this.answer.dropped ? `; the first ${this.answer.dropped} characters are not shown` : "";
  }
}

function parameterField(parameter, model) {
  const { name, schema, required, description = "" } = parameter;
  const values = schema.enum ?? (schema.type === "boolean" ? ["true", "false"] : null);
  const input = values
    ? element("select", {}, element("option", { value: "" }, "not sent"), ...values.map((value) => element("option", {}, value)))
    : element("input", schema.type === "integer" ? { type: "number", step: "1" } : {});
  if (schema.minimum !== undefined) input.min = schema.minimum;
  if (required) input.required = true;
  if (name === "model" && required) input.value = model;
  return { parameter, input, label: element("label", { title: description }, name, input) };
}

function exampleOf({ examples: [example], properties }, model, streams) {
  const made = { ...example };
  if (streams && "stream" in properties) made.stream = true;
  return model && "model" in properties ? Object.assign({ model }, made, { model }) : made;
}
