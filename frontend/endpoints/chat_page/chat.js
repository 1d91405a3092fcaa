// The chat: conversations, messages, and the requests that answer them.
import { ApiError, events, request, setKey } from "/page/api.js";
import { AnswerView, extend, newAnswer, toMessage } from "/page/answer.js";
import * as settings from "/page/settings.js";
import * as store from "/page/store.js";

const at = (id) => document.getElementById(id);
const conversations = store.load();
let current = null;
let stopper = null; // of the requests that run

function notify(text) {
  at("notice").textContent = text ?? "";
  at("notice").hidden = !text;
}

function keep() {
  notify(store.save(conversations));
  drawConversations();
}

// Conversations

function button(text, label, onClick) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", onClick);
  return made;
}

function drawConversations() {
  at("conversations").replaceChildren(...conversations.map((each) => {
    const item = document.createElement("li");
    if (each === current) item.setAttribute("aria-current", "true");
    const title = store.titleOf(each);
    item.append(button(title, "", () => open(each)), button("✕", `Delete ${title}`, () => remove(each)));
    return item;
  }));
}

function open(conversation) {
  stop();
  current = conversation;
  drawConversations();
  drawMessages();
  at("input").focus();
}

function startNew() {
  const fresh = conversations.find((each) => each.messages.length === 0) ?? store.newConversation();
  if (!conversations.includes(fresh)) conversations.unshift(fresh);
  open(fresh);
}

function remove(conversation) {
  conversations.splice(conversations.indexOf(conversation), 1);
  if (conversation === current) startNew();
  keep();
}

// Messages

function heading(text) {
  const made = document.createElement("h2");
  made.textContent = text;
  return made;
}

function drawMessages() {
  at("messages").replaceChildren(...current.messages.map((message, index) =>
    message.role === "user" ? userView(message, index) : answersView(message).node));
}

function userView(message, index) {
  const node = document.createElement("div");
  node.className = "message user";
  const text = document.createElement("div");
  text.className = "text";
  text.textContent = message.content;
  const edit = button("Edit and send again", "", () => {
    stop();
    current.messages.splice(index);
    drawMessages();
    at("input").value = message.content;
    at("input").focus();
  });
  node.append(heading("You"), text, edit);
  return node;
}

function answersView(message) {
  const node = document.createElement("div");
  node.className = "message";
  const row = document.createElement("div");
  row.className = "answers";
  const views = message.answers.map((answer) => new AnswerView(answer));
  row.append(...views.map((view) => view.node));
  node.append(heading(message.model ?? "Model"), row);
  if (views.length > 1) {
    const choose = (chosen) => {
      message.chosen = chosen;
      views.forEach((view, index) => view.node.classList.toggle("chosen", index === chosen));
      keep();
    };
    views.forEach((view, index) => view.node.append(button("Continue with this one", "", () => choose(index))));
    views[message.chosen].node.classList.add("chosen");
  }
  return { node, views };
}

function history(system) {
  const before = current.messages.map((message) =>
    message.role === "user" ? { role: "user", content: message.content } : toMessage(message.answers[message.chosen]));
  return system ? [{ role: "system", content: system }, ...before] : before;
}

// Requests

async function send(text) {
  const { system, isJson, requests } = settings.read();
  current.messages.push({ role: "user", content: text });
  const messages = history(system);
  const model = at("model").value;
  const groups = requests.map(({ fields, label }) => Array.from({ length: fields.n ?? 1 }, () => newAnswer(isJson, label)));
  const reply = { role: "assistant", model, chosen: 0, answers: groups.flat() };
  current.messages.push(reply);
  drawMessages();
  const { node, views } = answersView(reply);
  at("messages").lastChild.replaceWith(node);
  node.scrollIntoView({ block: "end" });
  stopper = new AbortController();
  showRunning(true);
  const { signal } = stopper;
  let first = 0;
  const running = requests.map(({ fields }, index) => {
    const own = views.slice(first, first += groups[index].length);
    return stream({ model, messages, ...fields }, own, signal);
  });
  await Promise.all(running);
  if (stopper?.signal === signal) showRunning(false);
  keep();
}

async function stream(body, views, signal) {
  const startedMs = performance.now();
  const arrivals = views.map(() => new Arrivals(startedMs));
  const reported = { stream_options: { include_usage: true }, return_token_ids: true, return_timings: true };
  let usage = null;
  let timings = null;
  try {
    const answer = await request("/v1/chat/completions", { body: { ...body, stream: true, ...reported }, signal });
    for await (const chunk of events(answer)) {
      for (const choice of chunk.choices) {
        arrivals[choice.index].add(choice.token_ids?.length ?? 0);
        extend(views[choice.index].answer, choice);
        views[choice.index].drawSoon();
      }
      usage = chunk.usage ?? usage;
      timings = chunk.timings ?? timings;
    }
  } catch (error) {
    for (const { answer } of views) answer.failure = error.name === "AbortError" ? "stopped" : error.message;
    if (error instanceof ApiError && error.status === 401) askForKey();
  }
  const serversRate = timings?.predicted_per_second ? timings.predicted_per_second / views.length : null;
  views.forEach((view, index) => {
    view.answer.stats = {
      ...arrivals[index].figures(serversRate),
      // of the request: its answers have one prompt
      promptTokens: usage ? usage.prompt_tokens : null,
      cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? 0,
      isCoalesced: usage?.penstock?.coalesced ?? false,
    };
    view.draw();
  });
}

// Tokens that a late page reads at once tell nothing of their rate.
const SHORTEST_SPAN_MS = 10;

// When the tokens of one answer arrive. An event has several if they come faster than events are written.
class Arrivals {
  constructor(startedMs) {
    this.startedMs = startedMs;
    this.firstMs = null;
    this.lastMs = null;
    this.numFirst = 0;
    this.num = 0;
  }

  add(num) {
    if (!num) return;
    this.lastMs = performance.now();
    if (this.firstMs === null) {
      this.firstMs = this.lastMs;
      this.numFirst = num;
    }
    this.num += num;
  }

  // serversRate stands in where all tokens were read at once.
  figures(serversRate) {
    const later = this.num - this.numFirst;
    const spanMs = this.lastMs - this.firstMs;
    return {
      ttftMs: this.firstMs === null ? null : this.firstMs - this.startedMs,
      tokensPerS: spanMs >= SHORTEST_SPAN_MS ? later / (spanMs / 1000) : serversRate,
      completionTokens: this.num,
    };
  }
}

function stop() {
  stopper?.abort();
  showRunning(false);
}

function showRunning(isRunning) {
  if (!isRunning) stopper = null;
  at("stop").hidden = !isRunning;
  at("send").hidden = isRunning;
}

// Models and the key

function askForKey() {
  at("key-form").hidden = false;
  at("key").focus();
}

async function loadModels() {
  try {
    const { data } = await (await request("/v1/models")).json();
    const able = data.filter((model) => model.capabilities?.structured_output !== false);
    at("model").replaceChildren(...able.map((model) => new Option(model.id, model.id)));
    at("model").onchange = () => settings.showDefaults(able[at("model").selectedIndex]?.default_sampling);
    at("model").onchange();
    notify(able.length ? null : "No served model writes text; see the API page for what they do.");
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askForKey();
    notify(error.message);
  }
}

// Events of the page

async function submit() {
  const text = at("input").value.trim();
  if (!text || stopper) return;
  try {
    const sent = send(text);
    at("input").value = "";
    await sent;
  } catch (error) {
    at("input").value = text;
    notify(error.message);
  }
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
at("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
at("stop").addEventListener("click", stop);
at("new").addEventListener("click", startNew);
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  loadModels();
});
at("export").addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([store.exportText(conversations)], { type: "application/json" }));
  link.download = "penstock-conversations.json";
  link.click();
  URL.revokeObjectURL(link.href);
});
at("import").addEventListener("change", async (event) => {
  try {
    const known = new Set(conversations.map((each) => each.id));
    const found = store.parse(await event.target.files[0].text());
    conversations.push(...found.filter((each) => !known.has(each.id)));
    keep();
  } catch (error) {
    notify(`The file cannot be imported: ${error.message}`);
  }
  event.target.value = "";
});

settings.restore();
at("settings").open = matchMedia("(min-width: 60rem)").matches;
startNew();
loadModels();
