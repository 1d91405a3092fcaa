// The requests that answer a message. They go on while another conversation is shown, after a broken connection, and after
// a reload of the page: the server keeps a stream that nobody reads, or computes it again under its old id.
import { ApiError, parts, request as ask, send } from "/page/api.js";
import { begin as beginAnswer, cutBack, extend, finish } from "/page/answer.js";
import { withPictures } from "/page/pictures.js";
import * as store from "/page/store.js";

const PATH = "/v1/chat/completions";
const MOST_LINGERING_BYTES = 1_000_000; // the server keeps no stream of a longer request
const SAVE_EVERY_MS = 300;
const SAVED_SHARE = 10; // saving a long answer takes at most a tenth of the time
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10_000;
const AWAY = new Set([0, 502, 503, 504]);
const AWAY_CODES = new Set(["backend_unavailable", "shutting_down"]);

export const RESTARTING = "The model's process restarts. The answer goes on.";
const LOST = "The server does not answer. What has arrived is kept, and the answer goes on when the server is back.";

let lingerS = 600; // less if the server's limit is less; 0 if it keeps no streams
const runs = new Map(); // message id → Run
const channel = new BroadcastChannel("penstock.stop");

// Called with the message that has changed, with the error if it cannot be saved, and if the server wants another key.
export const on = { change: () => null, unsaved: () => null, key: () => null };

// A request of a message; first and count are those of its answers.
export function newRequest(body, answers, first, count) {
  const lengths = answers.slice(first, first + count).map(beginAnswer);
  return { body: JSON.stringify(body), first, count, lengths, state: "open", stream: null, received: -1, number: null, timing: {},
    awayMs: 0, usage: null };
}

// A message's requests in this tab.
class Run {
  constructor(conversation, message) {
    this.conversation = conversation;
    this.message = message;
    this.controller = new AbortController();
    this.notice = null; // why nothing arrives
    this.retryNow = () => null;
    this.saver = null;
    this.saveEveryMs = SAVE_EVERY_MS;
  }

  changed(notice = this.notice) {
    this.notice = notice;
    on.change(this.message);
    this.saver ??= setTimeout(() => this.save(), this.saveEveryMs);
  }

  async save() {
    clearTimeout(this.saver);
    this.saver = null;
    if (!store.conversations.has(this.conversation.id)) return; // it has been deleted
    const beganMs = performance.now();
    await store.save(this.conversation, this.message).catch(on.unsaved);
    this.saveEveryMs = Math.max(SAVE_EVERY_MS, SAVED_SHARE * (performance.now() - beganMs));
  }
}

export const isRunning = (message) => message.isRunning === 1;

export const noticeOf = (message) => runs.get(message.id)?.notice ?? null;

// Saves the message, and sends its open requests.
export async function run(conversation, message) {
  message.isRunning = 1;
  await store.save(conversation, message).catch(on.unsaved);
  await begin(conversation, message, answer);
}

// Goes on with the message's open requests. Another tab that does so goes first.
export const resume = (conversation, message) => begin(conversation, message, goOn);

// Waits for the other tab that has the message's requests, and goes on with them when it leaves. Without locks nobody could
// tell when.
export const awaitTurn = (conversation, message) => navigator.locks && resume(conversation, message);

async function begin(conversation, message, work) {
  if (runs.has(message.id)) return;
  const made = new Run(conversation, message);
  runs.set(message.id, made);
  on.change(message);
  await owning(message.id, made.controller.signal, () => work(made)).catch((error) => {
    if (error.name !== "AbortError") throw error;
  });
  runs.delete(message.id);
  on.change(message);
}

// Without locks, as in a page that came over plain HTTP, the tab that asks last has the stream.
function owning(id, signal, work) {
  return navigator.locks ? navigator.locks.request(`penstock ${id}`, { signal }, work) : work();
}

async function goOn(made) {
  const newest = await store.latest(made.message);
  if (!newest?.isRunning) { // another tab has ended it
    delete made.message.isRunning;
    Object.assign(made.message, newest);
    return;
  }
  Object.assign(made.message, newest);
  for (const each of made.message.requests) if (each.state === "open") prepare(made, each);
  await answer(made);
}

async function answer(made) {
  const open = made.message.requests.filter((each) => each.state === "open");
  await Promise.all(open.map((each) => follow(made, each)));
  if (open.some((each) => each.state === "elsewhere")) return;
  delete made.message.isRunning;
  await made.save();
}

// A stream without an id began nowhere, or was lost with its connection: it starts anew.
function prepare(made, request) {
  answersOf(made, request).forEach((each, index) => {
    if (each.arrivals.num) each.arrivals.hasGap = true;
    if (!request.stream) cutBack(each, request.lengths[index]);
  });
}

function answersOf(made, request) {
  return made.message.answers.slice(request.first, request.first + request.count);
}

// Reads the request's stream to its end, over as many connections as that takes.
async function follow(made, request) {
  let usage = null;
  for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS)) {
    const before = request.received;
    try {
      await read(made, request);
      request.state = "done";
      usage = request.usage;
      break;
    } catch (error) {
      if (error.name === "AbortError") {
        end(made, request, "stopped", "stopped");
        break;
      }
      if (!(error instanceof ApiError)) throw error;
      if (error.code === "stream_taken_over") {
        request.state = "elsewhere";
        return;
      }
      if (isLingerRefused(error)) continue;
      const hasBegun = answersOf(made, request).some((each) => each.arrivals.num);
      const isAway = AWAY.has(error.status) || AWAY_CODES.has(error.code);
      if (!isAway || (hasBegun && !request.stream)) {
        if (error.status === 401) on.key();
        end(made, request, "failed", error.message);
        break;
      }
      if (request.received > before) pauseMs = FIRST_PAUSE_MS;
      for (const each of answersOf(made, request)) each.arrivals.hasGap = true;
      made.changed(error.status === 0 ? LOST : error.message);
      const since = Date.now();
      await pause(made, pauseMs);
      request.awayMs += Date.now() - since;
    }
  }
  for (const each of answersOf(made, request)) finish(each, usage);
  made.changed(null);
}

function end(made, request, state, text) {
  request.state = state;
  for (const each of answersOf(made, request)) each.failure = text;
}

function pause(made, ms) {
  return new Promise((resolve) => {
    made.retryNow = resolve;
    made.controller.signal.addEventListener("abort", resolve, { once: true });
    setTimeout(resolve, ms);
  });
}

// The server says in its refusal how long it keeps streams.
function isLingerRefused(error) {
  if (error.status !== 400 || !error.message.includes("X-Penstock-Linger") || !lingerS) return false;
  lingerS = Number(/from 1 to (\d+)/.exec(error.message)?.[1] ?? 0);
  return true;
}

function headersOf(request, body) {
  if (!lingerS || body.length > MOST_LINGERING_BYTES) return {};
  const headers = { "X-Penstock-Linger": String(lingerS) };
  if (request.stream) headers["X-Penstock-Stream"] = request.stream;
  if (request.received >= 0) headers["Last-Event-ID"] = String(request.received);
  return headers;
}

// Reads one connection.
async function read(made, request) {
  const { signal } = made.controller;
  const body = await withPictures(request.body, made.conversation);
  const answer = await ask(PATH, { body, headers: headersOf(request, body), signal });
  request.stream ??= answer.headers.get("x-penstock-stream");
  if (request.received < 0) {
    request.number = Number(answer.headers.get("x-penstock-request"));
    request.timing = timingOf(answer.headers.get("server-timing"));
  }
  made.changed(null);
  let awaySince = null;
  for await (const part of parts(answer)) {
    if (part.comment !== undefined) {
      if (part.comment !== "restarting" || awaySince !== null) continue;
      awaySince = Date.now();
      for (const each of answersOf(made, request)) each.arrivals.hasGap = true;
      made.changed(RESTARTING);
      continue;
    }
    if (awaySince !== null) request.awayMs += Date.now() - awaySince;
    awaySince = null;
    if (part.id !== null) request.received = part.id;
    if (part.isEnd) return;
    for (const choice of part.event.choices) extend(made.message.answers[request.first + choice.index], choice);
    request.usage = part.event.usage ?? request.usage;
    made.changed(null);
  }
}

// Milliseconds by name.
function timingOf(header) {
  return Object.fromEntries((header ?? "").split(", ").filter(Boolean).map((each) => {
    const [name, duration] = each.split(";dur=");
    return [name, Number(duration)];
  }));
}

// Stops the message's requests, in whichever tab they run. The server drops them.
export function stop(message) {
  if (!isRunning(message)) return;
  channel.postMessage(message.id);
  stopHere(message.id);
}

function stopHere(id) {
  const made = runs.get(id);
  if (!made) return;
  made.controller.abort();
  for (const { stream, state } of made.message.requests) {
    // A server that is away has nothing to drop.
    if (stream && state === "open") send(`/v1/streams/${stream}`, { method: "DELETE" }).catch(() => null);
  }
}

channel.onmessage = ({ data }) => stopHere(data);

// Goes on at once with what waits for the server, and tries again what has failed.
export function retry(conversation, message) {
  runs.get(message.id)?.retryNow();
  const failed = message.requests.filter((each) => each.state === "failed");
  for (const request of failed) {
    for (const each of message.answers.slice(request.first, request.first + request.count)) each.failure = null;
    request.state = "open";
  }
  return failed.length ? run(conversation, message) : undefined;
}

// Goes on with all that ran when the page was closed, or that another tab runs and may leave.
export async function resumeAll(conversationOf) {
  for (const { id, conversation } of await store.running()) {
    const known = await conversationOf(conversation);
    const message = known?.messages.get(id);
    if (message) resume(known, message);
  }
}

addEventListener("online", () => runs.forEach((each) => each.retryNow()));
document.addEventListener("visibilitychange", () => document.hidden && saveAll());
addEventListener("pagehide", saveAll);

function saveAll() {
  for (const each of runs.values()) if (each.saver) each.save();
}
