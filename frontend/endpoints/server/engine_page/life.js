// One request through its life: its events in order, and a line of what it did when.
import { colour, duration, element, prepare } from "/engine/draw.js";
import { describeEvent } from "/engine/tables.js";

const PHASES = { arrived: "budget", joined: "listeners", started: "decode", resumed: "decode", preempted: "wait" };

// Events of the request, and those of the sequences that it listens to while it is open.
export function lifeOf(key, events) {
  const numbers = new Set();
  const found = [];
  let isOpen = false;
  for (const event of events) {
    if (event.key === key) {
      isOpen = event.kind !== "ended";
      if (event.sequence >= 0) numbers.add(event.sequence);
      found.push(event);
    } else if (isOpen && event.sequence >= 0 && numbers.has(event.sequence) && (event.kind === "preempted" || event.kind === "resumed")) {
      found.push(event);
    }
  }
  return found;
}

export function drawLife(canvas, list, key, events, nowS) {
  const life = lifeOf(key, events);
  const { context, width, height } = prepare(canvas);
  list.replaceChildren(...life.map((event) =>
    element("li", "", `${duration(event.timeS - life[0].timeS)}: ${describeEvent(event)}`)));
  if (!life.length) {
    list.replaceChildren(element("li", "", "Its events are not kept any more."));
    return;
  }
  const first = life[0].timeS;
  const last = life.at(-1);
  const end = last.kind === "ended" ? last.timeS : Math.max(nowS, last.timeS);
  const span = Math.max(end - first, 1e-6);
  life.forEach((event, index) => {
    if (!(event.kind in PHASES)) return;
    const next = life.slice(index + 1).find((each) => each.kind in PHASES || each.kind === "ended");
    context.fillStyle = colour(PHASES[event.kind]);
    const from = ((event.timeS - first) / span) * width;
    context.fillRect(from, 8, Math.max(1, (((next?.timeS ?? end) - first) / span) * width - from), height - 16);
  });
  canvas.setAttribute("aria-label", `Life of the request: ${life.map(describeEvent).join(", then ")}`);
}
