// A conversation is a tree: a message that was edited, or an answer that was asked for again, is a branch. The shown path
// leads from a root to conversation.leaf.
export function newId() {
  return crypto.randomUUID?.() ?? `${Date.now()}-${Math.random().toString(36).slice(2)}`;
}

// messages is null until they are loaded.
export function newConversation() {
  return { id: newId(), title: "", leaf: null, changedMs: Date.now(), messages: new Map() };
}

export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let message = conversation.messages.get(leaf); message; message = conversation.messages.get(message.parent)) {
    found.unshift(message);
  }
  return found;
}

const children = (conversation, parent) =>
  [...conversation.messages.values()].filter((each) => each.parent === parent).sort((one, other) => one.madeMs - other.madeMs);

// The message and those that stand in its place on other branches, oldest first.
export function siblings(conversation, message) {
  return children(conversation, message.parent);
}

// Shows the newest path through the message.
export function show(conversation, message) {
  let last = message;
  for (let next = last; next; next = children(conversation, last.id).at(-1)) last = next;
  conversation.leaf = last.id;
}

// Adds a message after the parent, an id or null, and shows it.
export function add(conversation, parent, fields) {
  const last = conversation.messages.get(parent)?.madeMs ?? 0;
  const message = { id: newId(), conversation: conversation.id, parent, madeMs: Math.max(Date.now(), last + 1), ...fields };
  conversation.messages.set(message.id, message);
  conversation.leaf = message.id;
  conversation.changedMs = Date.now();
  return message;
}

export function titleOf(conversation) {
  return conversation.title || "New chat";
}
