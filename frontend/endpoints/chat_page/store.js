// The conversations of this browser, their files, and what other tabs do to them. Nothing of them goes anywhere else,
// except what is sent to the model.
import * as database from "/page/database.js";
import { parse, write } from "/page/formats.js";

const OLD_KEY = "penstock.conversations"; // local storage of earlier versions
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
  await database.put({ conversations: [record(conversation)], messages });
  channel.postMessage({ conversation: record(conversation), messages });
}

export async function remove(conversation) {
  await open(conversation);
  conversations.delete(conversation.id);
  await database.removeConversation(conversation.id);
  await dropDraft(conversation.id);
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

// Drafts: what is typed and attached, but not sent. The text is in local storage, which a page that closes still writes.

const textKey = (id) => `penstock.draft.${id}`;

export const draftText = (id) => localStorage.getItem(textKey(id)) ?? "";

// Throws if this browser has no room.
export function keepDraftText(id, text) {
  if (text) localStorage.setItem(textKey(id), text);
  else localStorage.removeItem(textKey(id));
}

// { id, files, edited }: files as in a message, and the id of the message that it replaces.
export const draft = (id) => database.get("drafts", id);

export const keepDraft = (record) =>
  record.files.length || record.edited ? database.put({ drafts: [record] }) : database.remove("drafts", record.id);

export async function dropDraft(id) {
  localStorage.removeItem(textKey(id));
  await database.remove("drafts", id);
}

// Files

export const exportText = async () => write([...conversations.values()], await database.allOf("messages"));

// Adds those that are not known yet. Throws for a file of another kind.
export async function importText(text) {
  await keepAll(parse(text).filter((each) => !conversations.has(each.id)));
}

async function keepAll(found) {
  for (const each of found) await save(each, ...each.messages.values());
}
