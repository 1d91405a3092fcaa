// Files of conversations: this page's own, and what llama.cpp, Open WebUI and ChatGPT export. Nothing in them is trusted.
import { finish, newAnswer } from "/page/answer.js";
import { fromData, toData } from "/page/pictures.js";
import { add, newConversation, newId, path, titleOf } from "/page/tree.js";

const FORMAT = "penstock.conversations.2";

const isText = (value) => typeof value === "string";
const isObject = (value) => value !== null && typeof value === "object";
const text = (value) => (isText(value) ? value : "");

function isAnswer(value) {
  return isObject(value) && isText(value.content) && isText(value.reasoning) &&
    Array.isArray(value.calls) && value.calls.every((call) => isText(call?.name) && isText(call.arguments)) &&
    (value.label === undefined || isText(value.label)) &&
    Array.isArray(value.tokens) && value.tokens.every((each) => isText(each?.token) && Array.isArray(each.top));
}

const isFile = (value) => isObject(value) && isText(value.name) && (isText(value.text) || isText(value.data));

function isMessage(value) {
  if (!isObject(value)) return false;
  if (value.role === "tool") return isText(value.content);
  if (value.role === "user") return isText(value.content) && (value.files === undefined || (Array.isArray(value.files) && value.files.every(isFile)));
  return value.role === "assistant" && Array.isArray(value.answers) && value.answers.length > 0 &&
    Number.isInteger(value.chosen) && value.chosen >= 0 && value.chosen < value.answers.length && value.answers.every(isAnswer);
}

const isConversation = (value) => isObject(value) && isText(value.id) && Array.isArray(value.messages) && value.messages.every(isMessage);

const isRequest = (value) => isObject(value) && isText(value.body) && Number.isInteger(value.first) && Number.isInteger(value.count);

function record({ id, title, changedMs, isPinned }) {
  return { ...newConversation(), id, title: text(title), changedMs: Number(changedMs) || 0, ...(isPinned === true ? { isPinned } : {}) };
}

// An earlier version had a list of messages, each the one before the next.
function fromList({ id, messages }) {
  const made = { ...newConversation(), id };
  for (const { role, content, model, chosen, answers } of messages) {
    add(made, made.leaf, role === "user" ? { role, content } : { role, model, chosen, answers, requests: [] });
  }
  return made;
}

// A parent comes before its children, so that no file makes a circle. No request of a file is sent again by itself.
function fromTree(value) {
  const messages = new Map();
  for (const { isRunning, ...each } of value.messages.toSorted((one, other) => one.madeMs - other.madeMs)) {
    const id = isText(each.id) ? each.id : newId();
    const requests = each.role === "assistant" ? { requests: (each.requests ?? []).filter(isRequest) } : {};
    const files = each.files ? { files: each.files.map(({ name, text, data }) => (isText(data) ? { name, blob: fromData(data) } : { name, text })) } : {};
    messages.set(id, { ...each, ...requests, ...files, id, conversation: value.id, parent: messages.has(each.parent) ? each.parent : null });
  }
  const leaf = messages.has(value.leaf) ? value.leaf : [...messages.keys()].at(-1) ?? null;
  return { ...record(value), leaf, messages };
}

// Other pages' files: nodes are { id, parent, role, content, reasoning, model }, as they stand in the file.

const entries = (value) => (isObject(value) ? Object.entries(value) : []);

const READERS = [
  { // ChatGPT
    isIts: (each) => isObject(each.mapping),
    read: (each) => ({ id: each.conversation_id ?? each.id, title: each.title, changedMs: each.update_time * 1000, leaf: each.current_node,
      nodes: entries(each.mapping).map(([id, node]) => ({ id, parent: node?.parent, role: node?.message?.author?.role,
        content: (Array.isArray(node?.message?.content?.parts) ? node.message.content.parts : []).filter(isText).join("\n"),
        model: node?.message?.metadata?.model_slug })) }),
  },
  { // Open WebUI
    isIts: (each) => isObject(each.chat?.history?.messages),
    read: ({ id, title, updated_at, pinned, chat }) => ({ id, title: title ?? chat.title, changedMs: updated_at * 1000, isPinned: pinned,
      leaf: chat.history.currentId,
      nodes: entries(chat.history.messages).map(([key, node]) => ({ ...node, id: key, parent: node?.parentId })) }),
  },
  { // llama.cpp
    isIts: (each) => isObject(each.conv) && Array.isArray(each.messages),
    read: ({ conv, messages }) => ({ id: conv.id, title: conv.name, changedMs: conv.lastModified, isPinned: conv.pinned, leaf: conv.currNode,
      nodes: messages.filter(isObject).map((node) => ({ ...node, reasoning: node.reasoningContent })) }),
  },
];

function answered({ model, reasoning }, content) {
  const answer = { ...newAnswer(false, ""), content, reasoning: text(reasoning), finish: "stop" };
  finish(answer, null);
  return { role: "assistant", model: text(model) || "Model", chosen: 0, answers: [answer], requests: [] };
}

// Adds what users and models wrote, from the roots on: what stands in a circle is not reached. Other roles leave no gap.
function fromNodes({ nodes, leaf, id, ...fields }) {
  const made = record({ ...fields, id: isText(id) ? id : newId() });
  const known = new Map(nodes.filter((node) => isText(node.id)).map((node) => [node.id, node]));
  const children = Map.groupBy(known.values(), (node) => (known.has(node.parent) ? node.parent : null));
  const shown = new Map([[null, null]]); // id in the file → id of the message that stands there
  for (const open = [null]; open.length;) {
    const parent = open.pop();
    for (const node of children.get(parent) ?? []) {
      const content = text(node.content);
      const isKept = content && (node.role === "user" || node.role === "assistant");
      const message = node.role === "user" ? { role: "user", content } : answered(node, content);
      shown.set(node.id, isKept ? add(made, shown.get(parent), message).id : shown.get(parent));
      open.push(node.id);
    }
  }
  made.leaf = shown.get(leaf) ?? made.leaf;
  made.changedMs = Number(fields.changedMs) || 0;
  return made;
}

function readJson(whole) {
  try {
    return JSON.parse(whole);
  } catch (error) { // llama.cpp writes a line for each conversation and each message
    const lines = whole.split("\n").filter((line) => line.trim()).map((line) => {
      try {
        return JSON.parse(line);
      } catch {
        throw error;
      }
    });
    const found = [];
    for (const { type, message, ...conv } of lines.filter(isObject)) {
      if (type === "session") found.push({ conv, messages: [] });
      else if (type === "message") found.at(-1)?.messages.push(message);
    }
    return found;
  }
}

// Returns the conversations of a file. Throws if it is none that this page knows.
export function parse(whole) {
  const found = readJson(whole);
  const isTree = found?.format === FORMAT;
  const list = isTree ? found.conversations : Array.isArray(found) ? found : [found];
  if (!Array.isArray(list) || !list.length || !list.every(isObject)) throw new Error("it holds no conversations");
  const reader = READERS.find(({ isIts }) => list.every(isIts));
  if (reader && !isTree) return list.map((each) => fromNodes(reader.read(each)));
  if (!list.every(isConversation)) throw new Error("it holds no conversations that this page knows");
  return list.map(isTree ? fromTree : fromList);
}

// conversations are records, messages all of theirs.
export async function write(conversations, messages) {
  const written = [];
  for (const { files, ...each } of messages) {
    if (files) each.files = await Promise.all(files.map(async ({ name, text, blob }) => (blob ? { name, data: await toData(blob) } : { name, text })));
    written.push(each);
  }
  const groups = Map.groupBy(written, (each) => each.conversation);
  const whole = conversations.map(({ messages: _, ...each }) => ({ ...each, messages: groups.get(each.id) ?? [] }));
  return JSON.stringify({ format: FORMAT, conversations: whole });
}

function section(message) {
  if (message.role !== "assistant") {
    const files = (message.files ?? []).map(({ name }) => `\n\n*File: ${name}*`).join("");
    return `## ${message.role === "user" ? "You" : `Result of ${message.name}`}\n\n${message.content}${files}`;
  }
  const { content, calls } = message.answers[message.chosen];
  return `## ${message.model}\n\n${[content, ...calls.map((call) => `\`${call.name}(${call.arguments})\``)].join("\n\n")}`;
}

// The shown branch as a text to read.
export const asMarkdown = (conversation) => [`# ${titleOf(conversation)}`, ...path(conversation).map(section)].join("\n\n") + "\n";
