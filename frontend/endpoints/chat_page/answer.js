// One answer: what has arrived of it, and when.
const nowMs = () => performance.timeOrigin + performance.now();

// label tells answers apart that were asked for with different settings.
export function newAnswer(isJson, label) {
  return { content: "", reasoning: "", calls: [], tokens: [], tokenIds: [], finish: null, failure: null, isJson, label, stats: null,
    arrivals: newArrivals() };
}

// Of the tokens of one request: an event has several if they come faster than events are written.
const newArrivals = () => ({ startedMs: nowMs(), firstMs: null, lastMs: null, numFirst: 0, num: 0, hasGap: false });

// Prepares the answer for a request whose tokens follow what it has. Returns the lengths to which `cutBack` goes back.
export function begin(answer) {
  Object.assign(answer, { failure: null, finish: null, stats: null, arrivals: newArrivals() });
  return { content: answer.content.length, reasoning: answer.reasoning.length, tokens: answer.tokens.length, tokenIds: answer.tokenIds.length };
}

export function cutBack(answer, lengths) {
  for (const [name, length] of Object.entries(lengths)) answer[name] = answer[name].slice(0, length);
  answer.calls = [];
  begin(answer);
}

// Adds a chunk's choice to the answer.
export function extend(answer, choice) {
  const delta = choice.delta ?? {};
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const call of delta.tool_calls ?? []) {
    const known = (answer.calls[call.index] ??= { id: call.id, name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  answer.tokens.push(...(choice.logprobs?.content ?? []).map(readToken));
  answer.tokenIds.push(...(choice.token_ids ?? []));
  answer.finish = choice.finish_reason ?? answer.finish;
  note(answer.arrivals, choice.token_ids?.length ?? 0);
}

export function readToken(entry) {
  return { token: entry.token, logprob: entry.logprob, top: entry.top_logprobs.map((each) => [each.token, each.logprob]) };
}

function note(arrivals, num) {
  if (!num) return;
  arrivals.lastMs = nowMs();
  if (arrivals.firstMs === null) {
    arrivals.firstMs = arrivals.lastMs;
    arrivals.numFirst = num;
  }
  arrivals.num += num;
}

// Tokens that a late page reads at once tell nothing of their rate.
const SHORTEST_SPAN_MS = 10;

// usage is the API's object, or null for an answer that did not end.
export function finish(answer, usage) {
  const { startedMs, firstMs, lastMs, numFirst, num, hasGap } = answer.arrivals;
  const spanMs = lastMs - firstMs;
  answer.stats = {
    ttftMs: firstMs === null ? null : firstMs - startedMs,
    tokensPerS: spanMs >= SHORTEST_SPAN_MS && !hasGap ? (num - numFirst) / (spanMs / 1000) : null,
    totalMs: nowMs() - startedMs,
    completionTokens: num,
    // of the request: its answers have one prompt
    promptTokens: usage ? usage.prompt_tokens : null,
    cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    isCoalesced: usage?.penstock?.coalesced ?? false,
  };
}

// The answer as a message of the next request.
export function toMessage(answer) {
  const message = { role: "assistant", content: answer.content };
  if (answer.calls.length) {
    message.tool_calls = answer.calls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
  }
  return message;
}
