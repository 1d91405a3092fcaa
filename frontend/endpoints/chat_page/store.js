// Conversations in this browser. Nothing of them goes anywhere else, except what is sent to the model.
const CONVERSATIONS = "penstock.conversations";
const MOST = 200;

const isText = (value) => typeof value === "string";

function isAnswer(value) {
  return (
    value !== null && typeof value === "object" && isText(value.content) && isText(value.reasoning) &&
    Array.isArray(value.calls) && value.calls.every((call) => isText(call?.name) && isText(call.arguments)) &&
    (value.label === undefined || isText(value.label)) && Array.isArray(value.tokens) && value.tokens.every((each) => isText(each?.token) && Array.isArray(each.top))
  );
}

function isConversation(value) {
  return (
    value !== null && typeof value === "object" && isText(value.id) && Array.isArray(value.messages) &&
    value.messages.every((message) =>
      message !== null && typeof message === "object" &&
      ((message.role === "user" && isText(message.content)) ||
        (message.role === "assistant" && Array.isArray(message.answers) && message.answers.length > 0 &&
          Number.isInteger(message.chosen) && message.chosen >= 0 && message.chosen < message.answers.length &&
          message.answers.every(isAnswer))))
  );
}

// Reads what `save` or `exportText` wrote. Throws for anything else.
export function parse(text) {
  const found = JSON.parse(text);
  if (!Array.isArray(found) || !found.every(isConversation)) throw new Error("the file holds no conversations of this page");
  return found.slice(0, MOST);
}

export function load() {
  try {
    return parse(localStorage.getItem(CONVERSATIONS) ?? "[]");
  } catch {
    return [];
  }
}

// Returns why the conversations cannot be kept; null if they are.
export function save(conversations) {
  try {
    localStorage.setItem(CONVERSATIONS, JSON.stringify(conversations.slice(0, MOST)));
    return null;
  } catch (error) {
    return `This browser cannot keep more conversations (${error.name}): export and delete some.`;
  }
}

export function exportText(conversations) {
  return JSON.stringify(conversations, null, 1);
}

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), messages: [] };
}

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  return first ? first.content.slice(0, 60) : "New chat";
}
