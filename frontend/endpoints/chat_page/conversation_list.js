// The list of conversations: search, new names, deletion with a way back.
import { at, button, element } from "/page/elements.js";
import * as store from "/page/store.js";
import { isRunning, stop } from "/page/streams.js";
import { titleOf } from "/page/tree.js";

let actions = null; // { current(), open(conversation), forget(conversation), notify(text) }
let found = null; // ids that the search has found; null without a search

export function listen(given) {
  actions = given;
  at("search").addEventListener("input", search);
  at("show-list").addEventListener("click", () => showColumn(at("show-list").getAttribute("aria-expanded") === "false"));
}

// On a narrow screen the list is behind a button.
export function showColumn(isShown) {
  at("show-list").setAttribute("aria-expanded", String(isShown));
}

export function seek() {
  showColumn(true);
  at("search").focus();
}

async function search() {
  const text = at("search").value.trim();
  const result = text ? await store.search(text) : null;
  if (text !== at("search").value.trim()) return; // another search has begun
  found = result;
  draw();
}

const runs = (conversation) => [...(conversation.messages?.values() ?? [])].some(isRunning);

export function draw() {
  const current = actions.current();
  const all = [...store.conversations.values()]
    .sort((one, other) => Boolean(other.isPinned) - Boolean(one.isPinned) || other.changedMs - one.changedMs);
  if (!store.conversations.has(current.id)) all.unshift(current);
  const shown = all.filter((each) => found === null || found.has(each.id));
  at("conversations").replaceChildren(...shown.map((each) => row(each, each.id === current.id)));
  if (!shown.length) at("conversations").append(element("li", "none", "None has these words."));
}

function row(conversation, isCurrent) {
  const title = titleOf(conversation);
  const open = button(title, "", () => actions.open(conversation));
  const pin = button(conversation.isPinned ? "★" : "☆", `Pin ${title}`, () => togglePin(conversation));
  pin.setAttribute("aria-pressed", String(Boolean(conversation.isPinned)));
  const item = element("li", runs(conversation) ? "running" : "", open, pin,
    button("✎", `Rename ${title}`, () => rename(item, conversation)), button("✕", `Delete ${title}`, () => remove(conversation)));
  if (runs(conversation)) open.title = "an answer arrives";
  if (isCurrent) item.setAttribute("aria-current", "true");
  return item;
}

async function togglePin(conversation) {
  conversation.isPinned = !conversation.isPinned;
  await store.open(conversation);
  await store.save(conversation);
  draw();
  at("conversations").querySelector(`[aria-label="Pin ${CSS.escape(titleOf(conversation))}"]`)?.focus();
}

function rename(item, conversation) {
  const field = element("input", "");
  field.value = titleOf(conversation);
  field.setAttribute("aria-label", "New name");
  const end = async (isKept) => {
    field.onblur = null;
    if (isKept && field.value.trim()) {
      conversation.title = field.value.trim();
      await store.open(conversation);
      await store.save(conversation);
    }
    draw();
  };
  field.onblur = () => end(true);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === "Escape") {
      event.stopPropagation();
      end(event.key === "Enter");
    }
  });
  item.replaceChildren(field);
  field.select();
}

async function remove(conversation) {
  await store.open(conversation);
  for (const message of conversation.messages.values()) stop(message);
  await store.remove(conversation);
  await actions.forget(conversation);
  showColumn(true); // it has the way back
  const back = button("Undo", `Undo the deletion of ${titleOf(conversation)}`, async () => {
    await store.restore(conversation);
    at("undo").hidden = true;
    actions.open(conversation);
  });
  at("undo").replaceChildren(`${titleOf(conversation)} is deleted. `, back);
  at("undo").hidden = false;
}
