// The conversations of this browser, their files, and what other tabs do to them. Nothing of them goes anywhere else,
// except what is sent to the model.
import * as database from "/page/database.js";
import { add, newConversation, newId } from "/page/tree.js";

const OLD_KEY = "penstock.conversations"; // local storage of earlier versions
const FORMAT = "penstock.conversations.2";
const TITLE_CHARACTERS = 60;

export const conversations = new Map();
const channel = new BroadcastChannel("penstock");

const record = ({ messages, ...rest }) => rest;

// onChange({ conversation, message, isRemoved }) is called for what another tab has changed.
export async function load(onChange) {
  channel.onmessage = ({ data }) => takeOver(data, onChange);
  for (const each of await database.allOf("conversations")) conversations.set(each.id, { ...each, messages: null });
  const old = localStorage.getItem(OLD_KEY);
  if (old !== null) {
    await keepAll(readable(old));
    localStorage.removeItem(OLD_KEY);
  }
}

function readable(text) {
  try {
    return parse(text);
  } catch {
    return [];
  }
}

export async function open(conversation) {
  if (conversation.messages) return;
  const found = await database.messagesOf(conversation.id);
  conversation.messages ??= new Map(found.map((each) => [each.id, each]));
}

// Saves the conversation and the messages of it that have changed. A new one is in the list from then on.
export async function save(conversation, ...messages) {
  conversations.set(conversation.id, conversation);
  const first = [...conversation.messages.values()].find((each) => each.role === "user");
  conversation.title ||= (first?.content || first?.files?.[0].name || "").slice(0, TITLE_CHARACTERS);
  await database.put([record(conversation)], messages);
  channel.postMessage({ conversation: record(conversation), messages });
}

export async function remove(conversation) {
  await open(conversation);
  conversations.delete(conversation.id);
  await database.remove(conversation.id);
  channel.postMessage({ removed: conversation.id });
}

export const restore = (conversation) => save(conversation, ...conversation.messages.values());

export const running = () => database.runningMessages();

export const latest = (message) => database.get("messages", message.id);

// Conversations with all words in their title or in a message, by id.
export async function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const texts = new Map([...conversations.values()].map((each) => [each.id, each.title]));
  for (const message of await database.allOf("messages")) {
    const added = message.content ?? message.answers.map((answer) => answer.content).join("\n");
    texts.set(message.conversation, `${texts.get(message.conversation) ?? ""}\n${added}`);
  }
  return new Set([...texts].filter(([, all]) => words.every((word) => all.toLowerCase().includes(word))).map(([id]) => id));
}

function takeOver({ conversation, messages, removed }, onChange) {
  if (removed) {
    conversations.delete(removed);
    onChange({ removed });
    return;
  }
  const known = conversations.get(conversation.id);
  const { leaf, ...fields } = conversation; // each tab shows its own branch
  if (known) Object.assign(known, fields);
  else conversations.set(conversation.id, { ...conversation, messages: null });
  if (!known?.messages) {
    onChange({});
    return;
  }
  for (const message of messages) {
    const before = known.messages.get(message.id);
    if (before) {
      delete before.isRunning;
      Object.assign(before, message);
    } else {
      known.messages.set(message.id, message);
      if (message.parent === known.leaf) known.leaf = message.id;
    }
  }
  onChange({ conversation: known, messages });
}

// Files

export async function exportText() {
  const messages = await database.allOf("messages");
  const whole = [...conversations.values()].map((each) =>
    ({ ...record(each), messages: messages.filter((message) => message.conversation === each.id) }));
  return JSON.stringify({ format: FORMAT, conversations: whole });
}

// Adds those that are not known yet. Throws for a file that `exportText` did not write.
export async function importText(text) {
  await keepAll(parse(text).filter((each) => !conversations.has(each.id)));
}

async function keepAll(found) {
  for (const each of found) await save(each, ...each.messages.values());
}

const isText = (value) => typeof value === "string";
const isObject = (value) => value !== null && typeof value === "object";

function isAnswer(value) {
  return isObject(value) && isText(value.content) && isText(value.reasoning) &&
    Array.isArray(value.calls) && value.calls.every((call) => isText(call?.name) && isText(call.arguments)) &&
    (value.label === undefined || isText(value.label)) &&
    Array.isArray(value.tokens) && value.tokens.every((each) => isText(each?.token) && Array.isArray(each.top));
}

function isMessage(value) {
  if (!isObject(value)) return false;
  if (value.role === "user" || value.role === "tool") return isText(value.content);
  return value.role === "assistant" && Array.isArray(value.answers) && value.answers.length > 0 &&
    Number.isInteger(value.chosen) && value.chosen >= 0 && value.chosen < value.answers.length && value.answers.every(isAnswer);
}

const isConversation = (value) => isObject(value) && isText(value.id) && Array.isArray(value.messages) && value.messages.every(isMessage);

// An earlier version had a list of messages, each the one before the next.
function fromList({ id, messages }) {
  const made = { ...newConversation(), id };
  for (const { role, content, model, chosen, answers } of messages) {
    add(made, made.leaf, role === "user" ? { role, content } : { role, model, chosen, answers, requests: [] });
  }
  return made;
}

const isRequest = (value) => isObject(value) && isText(value.body) && Number.isInteger(value.first) && Number.isInteger(value.count);

// A parent comes before its children, so that no file makes a circle. No request of a file is sent again by itself.
function fromTree(value) {
  const messages = new Map();
  for (const { isRunning, ...each } of value.messages.toSorted((one, other) => one.madeMs - other.madeMs)) {
    const id = isText(each.id) ? each.id : newId();
    const requests = each.role === "assistant" ? { requests: (each.requests ?? []).filter(isRequest) } : {};
    messages.set(id, { ...each, ...requests, id, conversation: value.id, parent: messages.has(each.parent) ? each.parent : null });
  }
  const leaf = messages.has(value.leaf) ? value.leaf : [...messages.keys()].at(-1) ?? null;
  return { id: value.id, title: isText(value.title) ? value.title : "", leaf, changedMs: Number(value.changedMs) || 0, messages };
}

// Returns the conversations of a file. Throws if it is none of ours.
function parse(text) {
  const found = JSON.parse(text);
  const isTree = found?.format === FORMAT;
  const list = isTree ? found.conversations : found;
  if (!Array.isArray(list) || !list.every(isConversation)) throw new Error("the file holds no conversations of this page");
  return list.map(isTree ? fromTree : fromList);
}
