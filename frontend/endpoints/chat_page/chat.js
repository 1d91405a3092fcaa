// The chat: the shown conversation, and what the reader does with it.
import { ApiError, request, setKey } from "/page/api.js";
import { addAnswers, addContinuation, addResults } from "/page/asking.js";
import * as attachments from "/page/attachments.js";
import * as list from "/page/conversation_list.js";
import { at } from "/page/elements.js";
import { followEnd } from "/page/follow.js";
import { AnswersView, toolView, userView } from "/page/message_views.js";
import * as settings from "/page/settings.js";
import * as store from "/page/store.js";
import * as streams from "/page/streams.js";
import { add, newConversation, path, show } from "/page/tree.js";
import { showWhy } from "/page/why.js";

const LAST = "penstock.last";
const DRAFT = "penstock.draft";
const MODEL = "penstock.model";

let current = newConversation();
let views = []; // of the shown path
let edited = null; // the message that the next one replaces, on a branch of its own
const shownRunning = new Set(); // ids of messages that are shown as running

function notify(text) {
  at("notice").textContent = text ?? "";
  at("notice").hidden = !text;
}

const unsaved = (error) =>
  notify(`This browser cannot keep more conversations (${error?.name ?? "error"}): export and delete some.`);

// Conversations

async function open(conversation) {
  await store.open(conversation);
  current = conversation;
  localStorage.setItem(LAST, conversation.id);
  list.showColumn(false);
  edit(null);
  list.draw();
  drawMessages();
  at("input").focus();
}

const startNew = () => open(newConversation());

function forget(conversation) {
  if (conversation === current) startNew();
  else list.draw();
}

function takeOver({ conversation, messages, removed }) {
  list.draw();
  if (removed && removed === current.id) startNew();
  if (conversation && messages.some((each) => !shown(each.id)) && conversation === current) drawMessages();
  for (const { id } of messages ?? []) {
    const message = conversation.messages.get(id);
    redraw(message);
    if (streams.isRunning(message)) streams.awaitTurn(conversation, message);
  }
}

// Messages

const shown = (id) => views.find((each) => each.message.id === id);

const actions = {
  show(message) {
    show(current, message);
    save();
    drawMessages();
  },
  edit,
  choose(message, index) {
    message.chosen = index;
    save(message);
    redraw(message);
  },
  regenerate: (message) => answer(message.parent),
  goOn(message) {
    addContinuation(current, message);
    streams.run(current, message);
  },
  sendResults(message, results) {
    const made = addResults(current, message, results);
    save(...made);
    answer(made.at(-1).id);
  },
  retry: (message) => streams.retry(current, message),
  why: showWhy,
};

const save = (...messages) => store.save(current, ...messages).catch(unsaved);

function viewOf(message) {
  if (message.role === "user") return userView(current, message, actions);
  return message.role === "tool" ? toolView(message) : new AnswersView(current, message, actions);
}

function drawMessages() {
  views = path(current).map(viewOf);
  at("messages").replaceChildren(...views.map((view) => view.node));
  showRunning();
  followEnd();
}

function redraw(message) {
  shown(message.id)?.draw();
  if (shownRunning.has(message.id) === streams.isRunning(message)) return;
  if (streams.isRunning(message)) shownRunning.add(message.id);
  else shownRunning.delete(message.id);
  list.draw();
  showRunning();
}

const running = () => views.map((view) => view.message).filter(streams.isRunning);

function showRunning() {
  const isRunning = running().length > 0;
  at("stop").hidden = !isRunning;
  at("send").hidden = isRunning;
}

function edit(message) {
  edited = message;
  at("editing").hidden = !message;
  if (!message) return;
  at("input").value = message.content;
  attachments.set(message.files ?? []);
  at("input").focus();
}

// Requests

// Adds the answers to the message with this id, and asks for them.
function answer(parent) {
  try {
    const made = addAnswers(current, parent, at("model").value);
    streams.run(current, made);
    drawMessages();
  } catch (error) {
    notify(error.message);
  }
}

async function submit() {
  const content = at("input").value.trim();
  if (running().length) return;
  try {
    settings.read(at("model").value); // throws before anything is sent
    const files = attachments.take();
    if (!content && !files.length) return;
    notify(null);
    const made = add(current, edited ? edited.parent : current.leaf, { role: "user", content, ...(files.length ? { files } : {}) });
    at("input").value = "";
    localStorage.removeItem(DRAFT);
    localStorage.setItem(LAST, current.id);
    edit(null);
    await save(made);
    answer(made.id);
  } catch (error) {
    notify(error.message);
  }
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
    const names = able.map((model) => model.id);
    at("model").replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(localStorage.getItem(MODEL))) at("model").value = localStorage.getItem(MODEL);
    at("model").onchange = () => settings.showDefaults(able[at("model").selectedIndex]?.default_sampling);
    at("model").onchange();
    settings.showModels(names);
    notify(able.length ? null : "No served model writes text; see the API page for what they do.");
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askForKey();
    notify(error.status ? error.message : "The server does not answer. Your conversations are here; reload the page when it is back.");
  }
}

// Events of the page

Object.assign(streams.on, { change: redraw, unsaved, key: askForKey });
at("model").addEventListener("change", () => localStorage.setItem(MODEL, at("model").value));
at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
at("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
at("input").addEventListener("input", () => localStorage.setItem(DRAFT, at("input").value));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !at("why").open) running().forEach(streams.stop);
  if (!event.ctrlKey && !event.metaKey) return;
  const key = event.key.toLowerCase();
  if (key === "k") list.seek();
  else if (key === "o" && event.shiftKey) startNew();
  else return;
  event.preventDefault();
});
at("stop").addEventListener("click", () => running().forEach(streams.stop));
at("new").addEventListener("click", startNew);
at("no-edit").addEventListener("click", () => edit(null));
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  loadModels();
});
at("export").addEventListener("click", async () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([await store.exportText()], { type: "application/json" }));
  link.download = "penstock-conversations.json";
  link.click();
  URL.revokeObjectURL(link.href);
});
at("import").addEventListener("change", async ({ target }) => {
  try {
    await store.importText(await target.files[0].text());
    list.draw();
  } catch (error) {
    notify(`The file cannot be imported: ${error.message}`);
  }
  target.value = "";
});

async function start() {
  settings.restore();
  attachments.listen(notify);
  list.listen({ current: () => current, open, forget });
  at("settings").open = matchMedia("(min-width: 60rem)").matches;
  at("input").value = localStorage.getItem(DRAFT) ?? "";
  loadModels();
  await store.load(takeOver).catch((error) => notify(`This browser keeps no conversations (${error?.name}).`));
  await open(store.conversations.get(localStorage.getItem(LAST)) ?? newConversation());
  await streams.resumeAll(async (id) => {
    const known = store.conversations.get(id);
    if (known) await store.open(known);
    return known;
  });
}

start();
