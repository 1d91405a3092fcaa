// Requests to the server of this page. The key lives in this tab only.
const KEY = "penstock.key";

// status is 0 if the server did not answer or the connection broke; code is that of the API's error object.
export class ApiError extends Error {
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// An empty key forgets the one before it.
export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// Sends the body, a text, with the tab's key. Returns the answer, whatever its status.
export function send(path, { method, headers = {}, body, signal }) {
  const key = sessionStorage.getItem(KEY);
  const sent = { ...headers };
  if (key) sent.Authorization = `Bearer ${key}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  return fetch(path, { method, headers: sent, body, signal });
}

// body is a text. Throws ApiError for an answer that is an error, and if there is none.
export async function request(path, { method, headers, body, signal } = {}) {
  const isGet = body === undefined;
  const answer = await send(path, { method: method ?? (isGet ? "GET" : "POST"), headers, signal, body }).catch((error) => {
    throw error.name === "AbortError" ? error : new ApiError(0, "the server does not answer");
  });
  if (!answer.ok) {
    const error = (await answer.json().catch(() => null))?.error;
    throw new ApiError(answer.status, error?.message ?? `the server answered with status ${answer.status}`, error?.code);
  }
  return answer;
}

async function* lines(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new ApiError(0, "the connection broke before the answer's end");
    const whole = (rest + value).split("\n");
    rest = whole.pop();
    yield* whole;
  }
}

// Yields { id, event } for each server-sent event, its JSON value and its number if it has one, and { comment } for each
// comment. The end is { id, isEnd }. Throws ApiError for an event that is an error.
export async function* parts(answer) {
  let id = null;
  for await (const line of lines(answer)) {
    if (line.startsWith("id: ")) {
      id = Number(line.slice(4));
    } else if (line.startsWith(": ")) {
      yield { comment: line.slice(2) };
    } else if (line === "data: [DONE]") {
      yield { id, isEnd: true };
      return;
    } else if (line.startsWith("data: ")) {
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(null, event.error.message, event.error.code);
      yield { id, event };
      id = null;
    }
  }
}

export async function* events(answer) {
  for await (const part of parts(answer)) if (part.event) yield part.event;
}
