// The engine view: receives the stream, and shows it live, paused, or scrolled back.
import { setKey } from "/page/api.js";
import { describeSums, drawFigures, drawHistogram } from "/engine/charts.js";
import { follow } from "/engine/feed.js";
import { drawLife } from "/engine/life.js";
import { drawPages } from "/engine/pages.js";
import { Record } from "/engine/record.js";
import { columnAt, describeStep, drawSteps, numColumns } from "/engine/steps.js";
import { drawEvents, drawRunning, drawWaiting } from "/engine/tables.js";

const at = (id) => document.getElementById(id);
const record = new Record();
let endS = null; // time of the last step that is shown; null follows the engine
let chosen = null; // a step
let followed = null; // a request's key
let isQueued = false;

function notify(text) {
  if ((at("notice").textContent || null) === (text || null)) return;
  at("notice").textContent = text ?? "";
  at("notice").hidden = !text;
}

// The index behind the last step that is shown.
function endIndex() {
  if (endS === null) return record.steps.length;
  const later = record.steps.findIndex((step) => step.endedS > endS);
  return later < 0 ? record.steps.length : later;
}

function visible() {
  const end = endIndex();
  return record.steps.slice(Math.max(0, end - numColumns(at("steps"))), end);
}

function drawSoon() {
  if (isQueued || document.hidden) return;
  isQueued = true;
  requestAnimationFrame(() => {
    isQueued = false;
    draw();
  });
}

function draw() {
  const state = record.stateAt(endS ?? Infinity);
  if (!state) return;
  const steps = visible();
  const nowS = endS ?? state.time_s;
  const events = endS === null ? record.events : record.events.filter((event) => event.timeS <= endS);
  at("model").textContent = state.model;
  followAsked();
  at("sums-section").hidden = !state.sums;
  for (const section of document.querySelectorAll("[data-of-all]")) section.hidden = Boolean(state.sums);
  if (state.sums) {
    at("sums").textContent = describeSums(state);
  } else {
    drawSteps(at("steps"), at("steps-legend"), steps, state.max_batch_tokens, chosen);
    drawHistogram(at("ttft"), at("ttft-figures"), state.histograms.ttft);
    drawHistogram(at("itl"), at("itl-figures"), state.histograms.itl);
    drawFigures(at("figures"), state, record.lost);
  }
  drawPages(at("pages"), at("pages-legend"), state, record.own);
  drawRunning(at("running"), state, record, choose);
  drawWaiting(at("waiting"), state, record, choose);
  drawEvents(at("events"), events, nowS, record, at("all-events").checked, choose);
  if (followed !== null) drawLife(at("life-line"), at("life-events"), followed, events, nowS);
  at("step").textContent = chosen ? describeStep(chosen, state.max_batch_tokens) : at("step").textContent;
  drawPlace(steps);
}

function drawPlace(steps) {
  const end = endIndex();
  const behind = record.steps.length - end;
  at("back").max = String(record.steps.length);
  if (document.activeElement !== at("back")) at("back").value = String(record.steps.length - behind);
  const last = steps.at(-1);
  if (!last) at("place").textContent = "No step has run yet.";
  else at("place").textContent = endS === null ? `Live, step ${last.step}` : `Step ${last.step}, ${behind} steps behind`;
  at("pause").textContent = endS === null ? "Pause" : "Go on live";
  at("pause").setAttribute("aria-pressed", String(endS !== null));
}

function showUpTo(index) {
  const step = record.steps[Math.max(0, Math.min(index, record.steps.length) - 1)];
  endS = step ? step.endedS : null;
  drawSoon();
}

function togglePause() {
  if (endS === null) showUpTo(record.steps.length);
  else endS = null;
  drawSoon();
}

function choose(key) {
  followed = key;
  at("life").hidden = false;
  at("life-title").textContent = `Life of ${record.nameOf(key)}`;
  at("life").scrollIntoView({ block: "nearest" });
  drawSoon();
}

// The address may name a request by its number, as the chat page does.
let asked = /^#request=(\d+)$/.exec(location.hash)?.[1];

function followAsked() {
  if (!asked) return;
  const [key] = [...record.names].findLast(([, name]) => name.endsWith(`.${asked}`)) ?? [];
  if (key === undefined) return;
  asked = null;
  choose(key);
}

function askForKey() {
  at("key-form").hidden = false;
  at("key").focus();
}

function receive(event) {
  record.add(event);
  if (event.type === "engine") {
    const gap = event.has_gap ? "Some steps are missing: the server did not read them in time." : null;
    notify(event.problem ? `${event.problem}.` : gap);
    return; // the viewer's own event follows, and then all is drawn
  }
  if (endS === null || record.steps.length === 0) drawSoon();
}

async function run() {
  await follow(receive, (problem) => problem && notify(problem));
  askForKey();
}

// Events of the page

at("pause").addEventListener("click", togglePause);
at("back").addEventListener("input", (event) => showUpTo(Number(event.target.value)));
at("all-events").addEventListener("change", drawSoon);
at("unfollow").addEventListener("click", () => {
  followed = null;
  at("life").hidden = true;
});
at("steps").addEventListener("click", (event) => {
  const steps = visible();
  chosen = steps[columnAt(at("steps"), event.clientX, steps.length)] ?? null;
  if (endS === null) togglePause();
  drawSoon();
});
at("steps").addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50 }[event.key];
  if (move === undefined) return;
  event.preventDefault();
  const place = chosen === null ? endIndex() - 1 : record.steps.indexOf(chosen) + move;
  chosen = record.steps[Math.max(0, Math.min(place, record.steps.length - 1))] ?? null;
  if (chosen !== null && !visible().includes(chosen)) showUpTo(record.steps.indexOf(chosen) + 1);
  if (endS === null) togglePause();
  drawSoon();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "p" && !event.ctrlKey && !event.metaKey && !event.altKey && event.target.id !== "key") togglePause();
});
document.addEventListener("visibilitychange", drawSoon);
addEventListener("resize", drawSoon);
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  notify(null);
  run();
});

run();
