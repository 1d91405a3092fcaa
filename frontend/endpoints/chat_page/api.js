// Requests to the server of this page. The key lives in this tab only.
const KEY = "penstock.key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
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

export async function request(path, { body, signal } = {}) {
  const method = body === undefined ? "GET" : "POST";
  const answer = await send(path, { method, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (!answer.ok) {
    const error = await answer.json().catch(() => null);
    throw new ApiError(answer.status, error?.error?.message ?? `the server answered with status ${answer.status}`);
  }
  return answer;
}

// Yields the JSON value of each server-sent event. Throws ApiError for an event that is an error.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "the connection broke before the answer's end");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(event.error.code, event.error.message);
      yield event;
    }
  }
}
