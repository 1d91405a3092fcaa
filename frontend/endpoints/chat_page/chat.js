// The chat: the shown conversation, and what the reader does with it.
import { ApiError, setKey } from "/page/api.js";
import { addAnswers, addContinuation, addResults, check } from "/page/asking.js";
import * as composer from "/page/composer.js";
import * as list from "/page/conversation_list.js";
import { at } from "/page/elements.js";
import { followEnd } from "/page/follow.js";
import { asMarkdown } from "/page/formats.js";
import { AnswersView, toolView, userView } from "/page/message_views.js";
import * as models from "/page/models.js";
import * as settings from "/page/settings.js";
import * as store from "/page/store.js";
import * as streams from "/page/streams.js";
import { add, newConversation, path, show, titleOf } from "/page/tree.js";
import { showWhy } from "/page/why.js";

const LAST = "penstock.last";
const MODEL = "penstock.model";

let current = newConversation();
let opened = null; // resolves when the last conversation is shown
let views = []; // of the shown path
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
  list.draw();
  drawMessages();
  await composer.open(conversation);
}

const startNew = () => open(newConversation());

async function forget(conversation) {
  if (conversation === current) await startNew();
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
  edit: composer.edit,
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
  why: (message, index) => showWhy(current, message, index),
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
  await opened;
  if (running().length) return;
  const { content, files, parent } = composer.written();
  if (!content && !files.length) return;
  const fields = { role: "user", content, ...(files.length ? { files } : {}) };
  try {
    check([...path(current, parent), fields], at("model").value); // throws before anything is sent
  } catch (error) {
    notify(error.message);
    return;
  }
  notify(null);
  const made = add(current, parent, fields);
  const forget = composer.empty();
  await save(made);
  localStorage.setItem(LAST, current.id);
  forget();
  answer(made.id);
}

// Models and the key

function askForKey() {
  at("key-form").hidden = false;
  at("key").focus();
}

async function loadModels() {
  try {
    const names = await models.load();
    at("model").replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(localStorage.getItem(MODEL))) at("model").value = localStorage.getItem(MODEL);
    showModel();
    settings.showModels(names);
    notify(names.length ? null : "No served model writes text; see the API page for what they do.");
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askForKey();
    notify(error.status ? error.message : "The server does not answer. Your conversations are here; reload the page when it is back.");
  }
}

const showModel = () => settings.showDefaults(models.model(at("model").value)?.default_sampling);

// Events of the page

Object.assign(streams.on, { change: redraw, unsaved, key: askForKey });
at("model").addEventListener("change", () => {
  localStorage.setItem(MODEL, at("model").value);
  showModel();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running().forEach(streams.stop);
  if (!event.ctrlKey && !event.metaKey) return;
  const key = event.key.toLowerCase();
  if (key === "k") list.seek();
  else if (key === "o" && event.shiftKey) startNew();
  else if (key === "/") at("keys").showModal();
  else return;
  event.preventDefault();
});
at("stop").addEventListener("click", () => running().forEach(streams.stop));
at("new").addEventListener("click", startNew);
at("show-keys").addEventListener("click", () => at("keys").showModal());
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  loadModels();
});

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

at("export").addEventListener("click", async () =>
  download("penstock-conversations.json", "application/json", await store.exportText()));
at("save-text").addEventListener("click", () =>
  download(`${titleOf(current).replace(/[^\p{L}\p{N}]+/gu, "-")}.md`, "text/markdown", asMarkdown(current)));
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
  composer.listen({ onProblem: notify, onUnsaved: unsaved, onSubmit: submit, ready: () => opened,
    noPictures: (name) => models.refusal(at("model").value, name) });
  list.listen({ current: () => current, open, forget });
  at("settings").open = matchMedia("(min-width: 60rem)").matches;
  loadModels();
  const loaded = store.load(takeOver).then(() => true, (error) => notify(`This browser keeps no conversations: ${error.message}.`));
  opened = loaded.then(() => open(store.conversations.get(localStorage.getItem(LAST)) ?? newConversation()));
  await opened;
  if (!(await loaded)) return;
  await streams.resumeAll(async (id) => {
    const known = store.conversations.get(id);
    if (known) await store.open(known);
    return known;
  });
}

start();
