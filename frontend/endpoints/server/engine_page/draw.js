// Helpers of all drawings: elements, canvases in device pixels, colours of the style sheet, units.
export function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Returns a context whose unit is a CSS pixel, and the canvas's size.
export function prepare(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

export function textColour() {
  return getComputedStyle(document.body).color;
}

export function legend(node, entries) {
  const wanted = entries.map(([name, text]) => `${name}:${text}`).join("|");
  if (node.dataset.entries === wanted) return;
  node.dataset.entries = wanted;
  node.replaceChildren(...entries.map(([name, text]) => {
    const mark = element("i");
    mark.style.background = `var(--${name})`;
    return element("span", "", mark, text);
  }));
}

export function duration(seconds) {
  if (seconds < 0.0995) return `${(1000 * seconds).toFixed(seconds < 0.00995 ? 2 : 1)} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(1)} s`;
  return `${Math.round(seconds / 60)} min`;
}

// Makes the parent's children those of the items, in order. What is kept stays in place, so that it keeps the focus and
// a click on it. make(item) returns a new child, update(child, item) fills it.
export function reconcile(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = new Set(items.map((item) => String(keyOf(item))));
  for (const [key, child] of known) if (!wanted.has(key)) child.remove();
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    let child = known.get(key);
    if (!child) {
      child = make(item);
      child.dataset.key = key;
    }
    update(child, item);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
}
