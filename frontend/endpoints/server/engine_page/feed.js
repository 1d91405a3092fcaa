// The stream of the engine's events: connects, and connects again after a break.
import { ApiError, events, request } from "/page/api.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10000;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Yields the events of one connection. Throws ApiError, and nothing else, when it ends: an error of whoever draws an event
// is no broken connection.
async function* connect(path) {
  try {
    yield* events(await request(path));
  } catch (error) {
    throw error instanceof ApiError ? error : new ApiError(0, "the connection to the server broke");
  }
}

// Calls onEvent for each event, onProblem with a text while there is no stream and null when there is one again.
// Returns when the server wants another key.
export async function follow(onEvent, onProblem) {
  const path = `/engine/events${location.search}`; // the page takes model and replica as the stream does
  let pauseMs = FIRST_PAUSE_MS;
  for (;;) {
    try {
      for await (const event of connect(path)) {
        onProblem(null);
        pauseMs = FIRST_PAUSE_MS;
        onEvent(event);
      }
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      onProblem(error.status ? error.message : "The connection to the server broke; trying again.");
      if (error.status === 401) return;
    }
    await pause(pauseMs);
    pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
  }
}
