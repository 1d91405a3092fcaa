// The KV cache as a map: each square is a page, or several if there are many.
import { colour, legend, prepare } from "/engine/draw.js";

const MOST_SQUARES = 3000;

const MOST_TENANTS = 6; // others that are shown one by one
const NUM_COLOURS = 4; // of them

// How many pages are of each kind, in the order of the map: colour, words, count. Pages that sequences share count once.
export function parts(state, own) {
  const { pages_used: held = 0, pages_idle: idle = 0, pages_total: total = 0 } = state.counters;
  const filled = state.tenants.reduce((sum, [, pages]) => sum + pages, 0);
  const scale = filled > held ? held / filled : 1;
  const heldBy = (named, notFull, whose, tenants) => {
    const count = (value) => Math.round(scale * tenants.reduce((sum, each) => sum + value(each), 0));
    return [
      [named, `${whose}, held and named`, count(([, , full]) => full)],
      [notFull, `${whose}, held, not full`, count(([, pages, full]) => pages - full)],
    ];
  };
  const others = state.tenants.filter(([tenant]) => tenant !== own).sort(([, one], [, other]) => other - one);
  const shown = others.filter(([tenant]) => tenant >= 0).slice(0, MOST_TENANTS).sort(([one], [other]) => one - other);
  const kinds = [
    ...heldBy("decode", "prefill", "yours", state.tenants.filter(([tenant]) => tenant === own)),
    ...shown.flatMap((each) => {
      const name = `other-${1 + (each[0] % NUM_COLOURS)}`;
      return heldBy(name, `${name}-part`, `other ${each[0] + 1}`, [each]);
    }),
    ...heldBy("others", "restored", "further others", others.filter((each) => !shown.includes(each))),
  ];
  const rest = Math.max(0, held - kinds.reduce((sum, [, , count]) => sum + count, 0));
  return [
    ...kinds, ["budget", state.sums ? "held by others" : "held otherwise", rest], ["idle", "idle, named, found again", idle],
    ["free", state.sums ? "free or idle" : "free", Math.max(0, total - held - idle)],
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
