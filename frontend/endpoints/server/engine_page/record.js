// What this page has received: steps, events, and the states of the engine by time.
const MOST_STEPS = 20000;
const MOST_EVENTS = 4000;
const MOST_STATES = 1200;
const MOST_NAMES = 20000;

const STEP = ["step", "endedS", "stepS", "waitedS", "decodes", "prefills", "restored", "listeners", "tokens", "dropped",
  "running", "waiting", "held", "idle", "failed"];
const SEQUENCE = ["number", "tenant", "runs", "computed", "prompt", "most", "cached", "listeners", "preemptions", "startedS",
  "arrivedS", "keys"];
const WAITING = ["key", "tenant", "arrivedS", "tokens", "most", "reason"];
const EVENT = ["timeS", "kind", "key", "sequence", "number"];

const named = (names) => (values) => Object.fromEntries(names.map((name, index) => [name, values[index]]));

export class Record {
  constructor() {
    this.clear();
    this.names = new Map(); // key of an own request → its name
    this.own = -1; // number of this viewer's tenant
    this.lost = 0;
  }

  clear() {
    this.steps = [];
    this.events = [];
    this.states = [];
  }

  // Takes in an event of the stream.
  add(event) {
    if (event.type === "own") {
      this.own = event.tenant;
      this.lost += event.lost_steps;
      for (const [key, name] of event.requests) this.names.set(key, name);
      while (this.names.size > MOST_NAMES) this.names.delete(this.names.keys().next().value);
      return;
    }
    const steps = event.steps.map(named(STEP));
    const events = event.events.map(named(EVENT));
    const last = this.steps.at(-1);
    const isRepeated = event.sums && events.length && events[0].timeS < (this.events.at(-1)?.timeS ?? 0);
    if (isRepeated || (steps.length && last && steps[0].endedS <= last.endedS)) {
      this.clear(); // a new stream begins with steps that are known
    }
    this.steps.push(...steps);
    this.events.push(...events);
    this.states.push({
      ...event, steps: null, events: null,
      sequences: event.sequences.map(named(SEQUENCE)),
      waiting: event.waiting.map(named(WAITING)),
    });
    if (this.steps.length > MOST_STEPS) this.steps.splice(0, this.steps.length - MOST_STEPS);
    if (this.events.length > MOST_EVENTS) this.events.splice(0, this.events.length - MOST_EVENTS);
    if (this.states.length > MOST_STATES) this.states.splice(0, this.states.length - MOST_STATES);
  }

  // The state at a time, or the earliest one that is known.
  stateAt(timeS) {
    let low = 0;
    let high = this.states.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.states[middle].time_s <= timeS) low = middle;
      else high = middle - 1;
    }
    return this.states[low];
  }

  whose(tenant) {
    if (tenant < 0) return "unknown";
    return tenant === this.own ? "you" : `other ${tenant + 1}`;
  }

  nameOf(key) {
    if (key < 0) return "";
    return this.names.has(key) ? `request ${this.names.get(key)}` : `another client's request ${key}`;
  }
}
