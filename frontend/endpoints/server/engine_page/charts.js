// Histograms since the backend began, and the table of counts.
import { colour, duration, element, prepare, textColour } from "/engine/draw.js";

// The bound below which a share of the values lies.
function quantile({ bounds_s: bounds, counts }, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  let before = 0;
  for (let index = 0; index < counts.length; index += 1) {
    before += counts[index];
    if (before >= share * total) return bounds[index] ?? null;
  }
  return null;
}

export function drawHistogram(canvas, node, histogram) {
  const { context, width, height } = prepare(canvas);
  const { bounds_s: bounds, counts, sum_s: sumS } = histogram ?? { bounds_s: [], counts: [], sum_s: 0 };
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) {
    node.textContent = "None yet.";
    return;
  }
  const most = Math.max(...counts);
  const step = width / counts.length;
  const fill = colour("decode");
  const text = textColour();
  counts.forEach((count, index) => {
    const size = (count / most) * (height - 18);
    context.fillStyle = fill;
    context.fillRect(index * step + 1, height - 14 - size, step - 2, Math.max(size, count ? 1 : 0));
    context.fillStyle = text;
    if (index % 3 === 0 && index < bounds.length) context.fillText(`≤ ${duration(bounds[index])}`, index * step, height - 2);
  });
  const bound = (share) => (quantile(histogram, share) === null ? `> ${duration(bounds.at(-1))}` : `≤ ${duration(quantile(histogram, share))}`);
  node.textContent = `${total} · mean ${duration(sumS / total)} · half ${bound(0.5)} · 95 % ${bound(0.95)}`;
  canvas.setAttribute("aria-label", node.textContent);
}

function percent(part, whole) {
  return whole ? `${part} of ${whole} (${((100 * part) / whole).toFixed(1)} %)` : "none yet";
}

// The load of a server whose requests a viewer does not see one by one.
export function describeSums({ sums, counters }) {
  return `${sums.running} requests run, ${sums.waiting} wait · ${sums.pages} of ${counters.pages_total ?? 0} pages held · ${sums.tokens_per_s} tokens per second`;
}

export function drawFigures(table, { counters }, lost) {
  if (counters.steps === undefined) return;
  const rows = [
    ["Prompt tokens found in the prefix cache", percent(counters.cached_tokens, counters.prompt_tokens)],
    ["Requests coalesced with an equal one", percent(counters.requests_coalesced, counters.requests_accepted)],
    ["Generated tokens", counters.generated_tokens],
    ["Tokens computed in vain", counters.wasted_tokens],
    ["Preemptions", counters.preemptions],
    ["Cancelled, expired, failed, refused", ["cancelled", "expired", "failed", "rejected"].map((name) => counters[`requests_${name}`]).join(", ")],
    ["Pages saved to host memory, restored", `${counters.pages_saved}, ${counters.pages_restored}`],
    ["Steps this page was too slow to receive", lost],
  ];
  table.tBodies[0].replaceChildren(...rows.map(([name, value]) => {
    const heading = element("th", "", name);
    heading.scope = "row";
    return element("tr", "", heading, element("td", "", String(value)));
  }));
}
