// How an answer came about: where its seconds went, what the engine did for it, how likely its tokens were, and whether the
// same tokens come again.
import { request as ask, events, parts } from "/page/api.js";
import { extend, newAnswer } from "/page/answer.js";
import { at, button, element } from "/page/elements.js";
import { withPictures } from "/page/pictures.js";
import { TokenShades } from "/page/token_shades.js";
import { lifeOf } from "/engine/life.js";
import { duration } from "/engine/draw.js";
import { Record } from "/engine/record.js";
import { describeEvent } from "/engine/tables.js";

// Returns [cause, milliseconds, class]. They add up to the time from sending to the end, as this page saw it.
export function causes({ arrivals, stats }, { timing, awayMs }) {
  const { prepare = 0, queue = 0, prefill = 0 } = timing;
  const generatedMs = stats.ttftMs === null ? 0 : arrivals.lastMs - arrivals.firstMs;
  const away = Math.min(awayMs, stats.totalMs);
  const generating = Math.max(0, generatedMs - away);
  const rest = stats.totalMs - prepare - queue - prefill - generating - away;
  return [
    ["prepared: template and tokens", prepare, "prepare"],
    ["waited in the queue", queue, "queue"],
    ["prefill: computed the prompt", prefill, "prefill"],
    ["generated", generating + Math.min(0, rest), "decode"],
    ["waited for a server that was away", away, "away"],
    ["network, and this page", Math.max(0, rest), "network"],
  ];
}

const seconds = (ms) => `${(ms / 1000).toFixed(3)} s`;

function secondsTable(answer, request) {
  const all = causes(answer, request).filter(([, ms]) => ms > 0);
  const bar = element("div", "cause-bar");
  bar.setAttribute("aria-hidden", "true");
  const rows = all.map(([cause, ms, name]) => {
    const part = element("i", `cause-${name}`);
    part.style.flexGrow = String(ms);
    bar.append(part);
    return element("tr", "", element("th", "", element("i", `cause-${name}`), cause), element("td", "", seconds(ms)));
  });
  const total = element("tr", "total", element("th", "", "in all"), element("td", "", seconds(answer.stats.totalMs)));
  const table = element("table", "", element("tbody", "", ...rows, total));
  for (const heading of table.querySelectorAll("th")) heading.scope = "row";
  return [bar, table];
}

function figures(answer, body) {
  const { promptTokens, cachedTokens, completionTokens, isCoalesced } = answer.stats;
  const sampling = ["temperature", "top_p", "top_k", "min_p", "seed"].filter((name) => body[name] !== undefined);
  const parts = [`Model ${body.model}`, ...sampling.map((name) => `${name.replace("_", " ")} ${body[name]}`)];
  if (promptTokens !== null) parts.push(`${promptTokens} prompt tokens, of which ${cachedTokens} were cached`);
  parts.push(`${completionTokens} tokens`, isCoalesced ? "computed together with an equal request" : "computed alone");
  return element("p", "figures", parts.join(" · "));
}

// Asks again with the same seed. Returns an answer with log probabilities.
async function repeat(conversation, answer, request, index, signal) {
  const body = { ...JSON.parse(await withPictures(request.body, conversation)), logprobs: true, top_logprobs: 5 };
  if (answer.failure) body.max_completion_tokens = Math.max(1, answer.arrivals.num);
  const again = Array.from({ length: request.count }, () => newAnswer(false, ""));
  for await (const part of parts(await ask("/v1/chat/completions", { body: JSON.stringify(body), signal }))) {
    for (const choice of part.event?.choices ?? []) extend(again[choice.index], choice);
  }
  return again[index];
}

function comparison(before, after) {
  const first = before.findIndex((token, index) => token !== after[index]);
  if (first < 0 && before.length === after.length) return `The same ${before.length} tokens came again.`;
  return `The tokens differ from number ${(first < 0 ? before.length : first) + 1} on.`;
}

// The engine's events of the request with this number, and how many rows its steps had.
async function readLife({ number, usage }, signal) {
  const record = new Record();
  for await (const event of events(await ask("/engine/events", { signal }))) {
    record.add(event);
    if (event.type === "own") break; // the first pair has all that is remembered
  }
  const isIts = (event) => event.kind === "arrived" && (!usage || event.number === usage.prompt_tokens) &&
    record.names.get(event.key)?.endsWith(`.${number}`);
  const arrived = record.events.findLast(isIts);
  const life = arrived ? lifeOf(arrived.key, record.events) : [];
  const steps = life.length ? record.steps.filter((step) => step.endedS >= life[0].timeS && step.endedS <= life.at(-1).timeS) : [];
  return { life, most: steps.reduce((most, step) => Math.max(most, step.running), 0) };
}

function lifeList({ life, most }) {
  if (!life.length) return [element("p", "", "The engine keeps this request's events no longer.")];
  const items = life.map((event) => element("li", "", `${duration(event.timeS - life[0].timeS)}: ${describeEvent(event)}`));
  const beside = most > 1 ? `Up to ${most - 1} other sequences ran in its steps.` : "Nothing else ran in its steps.";
  return [element("ol", "", ...items), ...(most ? [element("p", "", beside)] : [])];
}

export function showWhy(conversation, message, index) {
  const dialog = at("why");
  const answer = message.answers[index];
  const request = message.requests.findLast((each) => each.first <= index && index < each.first + each.count);
  const closed = new AbortController();
  const title = element("h2", "", "How this answer came about");
  title.id = "why-title";
  const close = button("Close", "", () => dialog.close());
  if (!request || !answer.stats?.totalMs) {
    dialog.replaceChildren(title, element("p", "", "This page has kept nothing of that."), close);
    dialog.showModal();
    return;
  }
  const result = element("p", "");
  result.setAttribute("role", "status");
  const tokens = element("div", "");
  const life = element("div", "", "Asking the engine …");
  const again = button("Repeat exactly", "", async () => {
    result.textContent = "Asking again with the same seed …";
    try {
      const found = await repeat(conversation, answer, request, index - request.first, closed.signal);
      const own = answer.tokenIds.slice(request.lengths[index - request.first].tokenIds);
      result.textContent = comparison(own, found.tokenIds);
      tokens.replaceChildren(new TokenShades(found.tokens).node);
    } catch (error) {
      result.textContent = error.message;
    }
  });
  if (answer.tokens.length) tokens.append(new TokenShades(answer.tokens).node);
  else result.textContent = "Repeat it to see how likely each token was.";
  readLife(request, closed.signal)
    .then((found) => life.replaceChildren(...lifeList(found)), (error) => life.replaceChildren(error.message));
  const link = element("a", "", "The engine's view");
  link.href = `/engine?model=${encodeURIComponent(JSON.parse(request.body).model)}#request=${request.number}`;
  dialog.replaceChildren(title, element("h3", "", "Seconds"), ...secondsTable(answer, request), figures(answer, JSON.parse(request.body)),
    element("h3", "", "In the engine"), life, element("p", "", link), element("h3", "", "Tokens"), result, tokens,
    element("div", "tools", again, close));
  dialog.addEventListener("close", () => closed.abort(), { once: true });
  dialog.showModal();
}
