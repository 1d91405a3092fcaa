// The form of settings: what it adds to a request, and presets of it.
import { at } from "/page/elements.js";

const SETTINGS = "penstock.settings";
const PRESETS = "penstock.presets";
const THEME = "penstock.theme";
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"];
const NUMBERS = [...SAMPLING, "max_completion_tokens", "seed", "n"];
const form = at("fields");
const fields = () => [...form.elements].filter((field) => field.name);

const kept = (key) => JSON.parse(localStorage.getItem(key) ?? "{}");
const keep = (key, value) => localStorage.setItem(key, JSON.stringify(value));

const values = () =>
  Object.fromEntries(fields().map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]));

function fill(wanted) {
  for (const field of fields()) {
    const value = wanted[field.name];
    if (field.type === "checkbox") field.checked = value === true;
    else field.value = String(value ?? field.defaultValue ?? "");
  }
}

export function restore() {
  fill(kept(SETTINGS));
  const theme = at("theme");
  theme.value = localStorage.getItem(THEME) ?? "light dark";
  theme.addEventListener("change", () => {
    localStorage.setItem(THEME, theme.value);
    document.documentElement.style.colorScheme = theme.value;
  });
  document.documentElement.style.colorScheme = theme.value;
  form.addEventListener("change", () => keep(SETTINGS, values()));
  drawPresets();
}

// Shows the models to compare with.
export function showModels(names) {
  const chosen = kept(SETTINGS).second_model;
  const field = form.elements.second_model;
  field.replaceChildren(new Option("the same", ""), ...names.map((name) => new Option(name, name)));
  field.value = names.includes(chosen) ? chosen : "";
}

// Shows what holds for a field that is left empty. defaults are those of the chosen model, if it is loaded.
export function showDefaults(defaults) {
  for (const name of SAMPLING) {
    const value = defaults?.[name];
    form.elements[name].placeholder = value === undefined ? "" : name === "top_k" && value === 0 ? "all" : String(value);
  }
}

// Presets

function drawPresets(chosen = "") {
  at("preset").replaceChildren(new Option("none", ""), ...Object.keys(kept(PRESETS)).sort().map((name) => new Option(name, name)));
  at("preset").value = chosen;
  at("preset-delete").disabled = !chosen;
}

at("preset").addEventListener("change", ({ target }) => {
  fill(kept(PRESETS)[target.value] ?? {});
  keep(SETTINGS, values());
  at("preset-name").value = target.value;
  at("preset-delete").disabled = !target.value;
});
at("preset-save").addEventListener("click", () => {
  const name = at("preset-name").value.trim();
  if (!name) return at("preset-name").focus();
  keep(PRESETS, { ...kept(PRESETS), [name]: values() });
  drawPresets(name);
});
at("preset-delete").addEventListener("click", () => {
  const { [at("preset").value]: _, ...others } = kept(PRESETS);
  keep(PRESETS, others);
  drawPresets();
});

// Requests

function json(name, what) {
  const text = form.elements[name].value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}

// Returns whether answers must be JSON, and the fields and the system text of each request to send: one, or two that are
// compared, with a label each. Throws for a field that is not valid.
export function read(model) {
  const wrong = fields().find((field) => !field.checkValidity());
  if (wrong) throw new Error(`${wrong.closest("label").firstChild.textContent.trim()}: ${wrong.validationMessage}`);
  const sent = { model };
  for (const name of NUMBERS) {
    if (form.elements[name].value !== "") sent[name] = Number(form.elements[name].value);
  }
  if (form.elements.logprobs.checked) Object.assign(sent, { logprobs: true, top_logprobs: 5 });
  const schema = json("schema", "JSON schema");
  if (schema !== undefined) sent.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = json("tools", "Tools");
  if (tools !== undefined) sent.tools = tools;
  return { isJson: schema !== undefined, requests: compared(sent, form.elements.system.value.trim()) };
}

function compared(sent, system) {
  const text = (name) => form.elements[name].value.trim();
  const first = { fields: sent, system, label: "" };
  const second = { fields: { ...sent }, system: text("second_system") || system, label: "" };
  const labels = [];
  if (text("second_model") && text("second_model") !== sent.model) {
    second.fields.model = text("second_model");
    labels.push([sent.model, second.fields.model]);
  }
  if (text("second_temperature")) {
    second.fields.temperature = Number(text("second_temperature"));
    labels.push([sent.temperature === undefined ? "default temperature" : `temperature ${sent.temperature}`,
      `temperature ${second.fields.temperature}`]);
  }
  if (text("second_system")) labels.push(["first system text", "second system text"]);
  if (!labels.length) return [first];
  first.label = labels.map(([one]) => one).join(", ");
  second.label = labels.map(([, other]) => other).join(", ");
  return [first, second];
}
