// The message that is being written: its text, its files, and the message that it replaces. Each conversation has its own,
// which this browser keeps until it is sent.
import * as attachments from "/page/attachments.js";
import { at } from "/page/elements.js";
import * as store from "/page/store.js";
import { path } from "/page/tree.js";

const NEW = "new"; // conversations that have no message yet share a draft

let conversation = null;
let kept = NEW; // the draft's name
let edited = null; // the message that the next one replaces, on a branch of its own
let recalled = null; // an earlier message that stands in the field unchanged
let tellUnsaved = () => null;

const input = at("input");
const nameOf = (each) => (store.conversations.has(each.id) ? each.id : NEW);

function keepText() {
  try {
    store.keepDraftText(kept, input.value);
  } catch (error) {
    tellUnsaved(error);
  }
}

function keepFiles() {
  store.keepDraft({ id: kept, files: attachments.attached(), edited: edited?.id ?? null }).catch(tellUnsaved);
}

function setEdited(message) {
  edited = message;
  at("editing").hidden = !message;
}

function fill(text) {
  input.value = text;
  keepText();
}

// Shows what was being written in the conversation.
export async function open(next) {
  const typed = conversation ? "" : input.value; // while the page loaded
  conversation = next;
  kept = nameOf(next);
  recalled = null;
  fill(typed || store.draftText(kept));
  setEdited(null);
  attachments.show([]);
  input.focus();
  const found = await store.draft(kept).catch(() => null); // a browser that keeps nothing has said so
  if (!found || conversation !== next) return;
  attachments.show([...found.files, ...attachments.attached()]);
  setEdited(next.messages.get(found.edited) ?? edited);
}

export function edit(message) {
  setEdited(message);
  fill(message.content);
  attachments.show(message.files ?? []);
  keepFiles();
  input.focus();
}

// What would be sent; parent is the id of the message that it follows.
export function written() {
  return { content: input.value.trim(), files: attachments.attached(), parent: edited ? edited.parent : conversation.leaf };
}

// Empties the fields. Returns what forgets the draft, to be called when the message is kept.
export function empty() {
  const before = kept;
  input.value = "";
  recalled = null;
  setEdited(null);
  attachments.show([]);
  return () => {
    kept = nameOf(conversation);
    store.dropDraft(before).catch(tellUnsaved);
  };
}

// The arrows go through what was asked before, while the field has nothing else.
function recall(event) {
  if (input.value !== (recalled ?? "")) return;
  const asked = path(conversation).filter((each) => each.role === "user").map((each) => each.content);
  const before = recalled === null ? asked.length : asked.lastIndexOf(recalled);
  const next = asked[before + (event.key === "ArrowUp" ? -1 : 1)];
  if (next === undefined && event.key === "ArrowUp") return;
  event.preventDefault();
  recalled = next ?? null;
  fill(next ?? "");
}

// files are options of attachments.
export function listen({ onUnsaved, onSubmit, ...files }) {
  tellUnsaved = onUnsaved;
  attachments.listen({ onChange: keepFiles, ...files });
  input.addEventListener("input", keepText);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowUp" || event.key === "ArrowDown") recall(event);
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    onSubmit();
  });
  at("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    onSubmit();
  });
  at("no-edit").addEventListener("click", () => {
    setEdited(null);
    keepFiles();
    input.focus();
  });
}
