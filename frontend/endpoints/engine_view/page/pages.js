// The KV cache as a map: each square is a page, or several if there are many.
import { colour, legend, prepare } from "/engine/draw.js";

const MOST_SQUARES = 3000;

// How many pages are of each kind, in the order of the map. Pages that sequences share count once.
export function parts(state, own) {
  const { pages_used: held = 0, pages_idle: idle = 0, pages_total: total = 0 } = state.counters;
  const filled = state.tenants.reduce((sum, [, pages]) => sum + pages, 0);
  const scale = filled > held ? held / filled : 1;
  const sums = { ownNamed: 0, own: 0, othersNamed: 0, others: 0 };
  for (const [tenant, pages, full] of state.tenants) {
    const whose = tenant === own ? "own" : "others";
    sums[`${whose}Named`] += full * scale;
    sums[whose] += (pages - full) * scale;
  }
  const rounded = Object.fromEntries(Object.entries(sums).map(([name, count]) => [name, Math.round(count)]));
  const rest = Math.max(0, held - Object.values(rounded).reduce((sum, count) => sum + count, 0));
  return [
    ["decode", "yours, held and named", rounded.ownNamed], ["prefill", "yours, held, not full", rounded.own],
    ["others", "others', held and named", rounded.othersNamed], ["restored", "others', held, not full", rounded.others],
    ["budget", "held otherwise", rest], ["idle", "idle, named, found again", idle],
    ["free", "free", Math.max(0, total - held - idle)],
  ];
}

export function drawPages(canvas, node, state, own) {
  const kinds = parts(state, own);
  const total = state.counters.pages_total ?? 0;
  const { context, width, height } = prepare(canvas);
  const pagesPerSquare = Math.max(1, Math.ceil(total / MOST_SQUARES));
  const squares = Math.max(1, Math.ceil(total / pagesPerSquare));
  let size = Math.max(3, Math.floor(Math.sqrt((width * height) / squares)));
  while (size > 3 && Math.ceil(squares / Math.floor(width / size)) * size > height) size -= 1;
  const perLine = Math.max(1, Math.floor(width / size));
  const colours = kinds.map(([name]) => colour(name));
  let end = 0;
  const ends = kinds.map(([, , count]) => (end += count));
  let kind = 0;
  for (let index = 0; index < squares && total; index += 1) {
    while (kind < kinds.length - 1 && index * pagesPerSquare >= ends[kind]) kind += 1;
    context.fillStyle = colours[kind];
    context.fillRect((index % perLine) * size, Math.floor(index / perLine) * size, size - 1, size - 1);
  }
  const shown = kinds.filter(([, , count]) => count);
  legend(node, shown.map(([name, text, count]) => [name, `${text}: ${count}`]));
  const words = shown.map(([, text, count]) => `${text}: ${count}`).join(", ");
  canvas.setAttribute("aria-label", total ? `${total} pages. ${words}` : "This model has no KV cache");
}
