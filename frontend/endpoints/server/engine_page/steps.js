// Steps as columns: rows by kind, tokens against the budget, and how long the device worked and waited.
import { colour, duration, legend, prepare, textColour } from "/engine/draw.js";

const COLUMN = 5;
const KINDS = [["decodes", "decode"], ["prefills", "prefill"], ["restored", "restored"], ["listeners", "listeners"]];
const LEGEND = [["decode", "decode rows"], ["prefill", "prefill rows"], ["restored", "restored rows"],
  ["listeners", "coalesced listeners"], ["dropped", "dropped rows"], ["budget", "tokens; line: the budget"], ["step", "step time"],
  ["wait", "device waits; failed steps"], ["idle", "dotted line: idle before the step"]];
const NAMES = ["decode", "prefill", "restored", "listeners", "budget", "wait", "step", "dropped"];
const SCALE_SHARE = 0.98; // of the steps fit the scale of time; longer ones are cut, with a mark
const LEAST_IDLE_S = 0.05;

export function numColumns(canvas) {
  return Math.max(1, Math.floor(canvas.getBoundingClientRect().width / COLUMN));
}

function most(steps, value) {
  return steps.reduce((found, step) => Math.max(found, value(step)), 0) || 1;
}

// A value that most of the steps do not exceed.
function percentile(steps, value) {
  const sorted = steps.map(value).sort((one, other) => one - other);
  return sorted[Math.floor(SCALE_SHARE * (sorted.length - 1))] || 1;
}

// How long there was no request before the step.
export function idleBefore(step, previous) {
  return previous ? Math.max(0, step.endedS - step.stepS - step.waitedS - previous.endedS) : 0;
}

function dotted(context, fromX, fromY, toX, toY) {
  context.setLineDash([4, 3]);
  context.beginPath();
  context.moveTo(fromX, fromY);
  context.lineTo(toX, toY);
  context.stroke();
  context.setLineDash([]);
}

export function rowsOf(step) {
  return step.decodes + step.prefills + step.restored + step.listeners;
}

// Draws the steps, the last one at the right edge. chosen is one of them or null.
export function drawSteps(canvas, node, steps, budget, chosen) {
  const { context, width, height } = prepare(canvas);
  const colours = Object.fromEntries(NAMES.map((name) => [name, colour(name)]));
  const text = textColour();
  const bands = [[14, height * 0.45], [height * 0.45 + 16, height * 0.7], [height * 0.7 + 16, height - 2]];
  const [rowBand, tokenBand, timeBand] = bands;
  const mostRows = most(steps, rowsOf);
  const mostTokens = Math.max(budget, most(steps, (step) => step.tokens));
  const mostS = percentile(steps, (step) => step.stepS + step.waitedS);
  const left = width - steps.length * COLUMN;
  const bar = (index, [top, bottom], from, to, name) => {
    const size = bottom - top;
    context.fillStyle = colours[name];
    context.fillRect(left + index * COLUMN, bottom - to * size, COLUMN - 1, Math.max((to - from) * size, to > from ? 0.5 : 0));
  };
  steps.forEach((step, index) => {
    let stacked = 0;
    for (const [field, name] of KINDS) {
      bar(index, rowBand, stacked / mostRows, (stacked + step[field]) / mostRows, name);
      stacked += step[field];
    }
    if (step.dropped) bar(index, rowBand, 0, Math.min(1, step.dropped / mostRows), "dropped");
    bar(index, tokenBand, 0, step.tokens / mostTokens, step.failed ? "wait" : "budget");
    const worked = Math.min(1, step.stepS / mostS);
    bar(index, timeBand, 0, worked, "step");
    bar(index, timeBand, worked, Math.min(1, (step.stepS + step.waitedS) / mostS), "wait");
    if (step.stepS + step.waitedS > mostS) {
      context.fillStyle = text; // the bar is cut
      context.fillRect(left + index * COLUMN, timeBand[0] - 2, COLUMN - 1, 2);
    }
    if (idleBefore(step, steps[index - 1]) >= LEAST_IDLE_S) {
      context.strokeStyle = text;
      dotted(context, left + index * COLUMN - 0.5, rowBand[0], left + index * COLUMN - 0.5, timeBand[1]);
    }
    if (step === chosen) {
      context.strokeStyle = text;
      context.strokeRect(left + index * COLUMN - 1, rowBand[0] - 2, COLUMN + 1, timeBand[1] - rowBand[0] + 3);
    }
  });
  if (budget) {
    const y = tokenBand[1] - (budget / mostTokens) * (tokenBand[1] - tokenBand[0]);
    context.strokeStyle = text;
    dotted(context, 0, y, width, y);
  }
  context.fillStyle = text;
  context.fillText(`rows, up to ${mostRows}`, 2, 10);
  context.fillText(`tokens, budget ${budget}`, 2, tokenBand[0] - 4);
  context.fillText(`time, up to ${duration(mostS)}; a mark on top: longer`, 2, timeBand[0] - 4);
  legend(node, LEGEND);
  const last = steps.at(-1);
  canvas.setAttribute("aria-label", last ? `${steps.length} steps as columns. Last: ${describeStep(last, budget)}` : "No steps yet");
}

// The index among so many drawn steps at a place on the canvas.
export function columnAt(canvas, x, count) {
  const { left, width } = canvas.getBoundingClientRect();
  return Math.floor((x - left - (width - count * COLUMN)) / COLUMN);
}

export function describeStep(step, budget) {
  const parts = [`step ${step.step}`, `${step.decodes} decode, ${step.prefills} prefill, ${step.restored} restored rows`,
    `${step.listeners} coalesced listeners`, `${step.tokens} of ${budget} tokens`, `took ${duration(step.stepS)}`,
    `the device waited ${duration(step.waitedS)} for it`, `${step.running} running, ${step.waiting} waiting`];
  if (step.dropped) parts.push(`${step.dropped} rows dropped`);
  if (step.failed) parts.push("it failed");
  return parts.join(" · ");
}
