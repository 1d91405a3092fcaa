// Tables of running and waiting sequences, and the list of events.
import { duration, element, reconcile } from "/engine/draw.js";

const QUIET = new Set(["arrived", "started", "joined", "ended"]);
const FINISHES = ["", "stop", "length", "cancelled", "rejected", "failed", "expired"];
const MOST_ROWS = 300;
const MOST_EVENTS = 200;

function followButton(text, key, onFollow) {
  const made = element("button", "", text);
  made.type = "button";
  made.addEventListener("click", () => onFollow(key));
  return made;
}

// A row whose cells are empty, but for a button in the first one if there is a request to follow.
function row(count, key, onFollow) {
  const made = element("tr", "", ...Array.from({ length: count }, () => element("td", "")));
  if (key >= 0) made.cells[0].append(followButton("", key, onFollow));
  return made;
}

function fill(cell, text) {
  const target = cell.firstElementChild ?? cell;
  if (target.textContent !== text) target.textContent = text;
}

function showProgress(cell, sequence) {
  const bar = cell.firstElementChild ?? cell.appendChild(document.createElement("progress"));
  bar.max = Math.max(1, sequence.prompt + sequence.most);
  bar.value = Math.min(bar.max, sequence.computed);
  bar.setAttribute("aria-label", `Progress of sequence ${sequence.number}`);
}

function stateOf(sequence) {
  const parts = [sequence.runs ? (sequence.computed < sequence.prompt ? "prefill" : "decode") : "preempted: its pages were needed"];
  if (sequence.preemptions) parts.push(`preempted ${sequence.preemptions} times`);
  if (sequence.listeners > 1) parts.push(`${sequence.listeners} listeners`);
  return parts.join(", ");
}

// Shows a sentence below the list or table where it has no rows.
function sayIfEmpty(node, text, isEmpty) {
  const none = node.nextElementSibling ?? node.after(element("p", "none", text)) ?? node.nextElementSibling;
  none.hidden = !isEmpty;
}

export function drawRunning(table, state, record, onFollow) {
  const keyOf = (sequence) => sequence.keys[0] ?? -1;
  sayIfEmpty(table, "Nothing runs.", state.sequences.length === 0);
  const make = (sequence) => row(7, keyOf(sequence), onFollow);
  reconcile(table.tBodies[0], state.sequences.slice(0, MOST_ROWS), (each) => `${each.number} ${keyOf(each)}`, make, (made, sequence) => {
    const most = sequence.most ? `of at most ${sequence.prompt + sequence.most}` : "";
    fill(made.cells[0], keyOf(sequence) < 0 ? `sequence ${sequence.number}` : record.nameOf(keyOf(sequence)));
    fill(made.cells[1], record.whose(sequence.tenant));
    fill(made.cells[2], duration(state.time_s - sequence.arrivedS));
    showProgress(made.cells[3], sequence);
    fill(made.cells[4], `${sequence.computed} ${most}`);
    fill(made.cells[5], String(sequence.cached));
    fill(made.cells[6], stateOf(sequence));
  });
}

export function drawWaiting(table, state, record, onFollow) {
  const unlisted = { key: -1, count: state.num_waiting - state.waiting.length };
  const shown = unlisted.count > 0 ? [...state.waiting, unlisted] : state.waiting;
  sayIfEmpty(table, "No request waits.", shown.length === 0);
  reconcile(table.tBodies[0], shown, (each) => each.key, (each) => row(4, each.key, onFollow), (made, request) => {
    fill(made.cells[0], request === unlisted ? `and ${unlisted.count} more` : record.nameOf(request.key));
    if (request === unlisted) return;
    fill(made.cells[1], duration(state.time_s - request.arrivedS));
    fill(made.cells[2], `${request.tokens} + ${request.most}`);
    fill(made.cells[3], request.reason);
  });
}

export function describeEvent(event) {
  switch (event.kind) {
    case "arrived": return `arrived with ${event.number} tokens`;
    case "joined": return `coalesced with sequence ${event.sequence}`;
    case "started": return `started, ${event.number} tokens cached`;
    case "resumed": return `resumed, ${event.number} tokens cached`;
    case "ended": return `ended: ${FINISHES[event.number] ?? event.number}`;
    case "failed step": return `step ${event.number} failed`;
    case "restarted": return `the model's process ${event.number} began`;
    case "frontend left": return "a server process that takes requests has ended";
    default: return event.kind;
  }
}

export function drawEvents(list, events, nowS, record, showsAll, onFollow) {
  const shown = events.filter((event) => showsAll || !QUIET.has(event.kind) || (event.kind === "ended" && event.number > 3));
  sayIfEmpty(list, "None yet.", shown.length === 0);
  const keyOf = (event) => `${event.timeS} ${event.kind} ${event.key} ${event.sequence}`;
  const make = (event) => {
    const item = element("li", "", element("span", ""), " ");
    if (event.key >= 0) item.append(followButton(record.nameOf(event.key), event.key, onFollow));
    else if (event.sequence >= 0) item.append(`sequence ${event.sequence}`);
    return item;
  };
  reconcile(list, shown.slice(-MOST_EVENTS).reverse(), keyOf, make, (item, event) => {
    fill(item, `${duration(Math.max(0, nowS - event.timeS))} ago: ${describeEvent(event)}`);
  });
}
