// The form of settings: what it adds to a request.
const SETTINGS = "penstock.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "max_completion_tokens", "seed", "n"];
const form = document.getElementById("fields");

export function restore() {
  const kept = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
  for (const field of form.elements) {
    if (!(field.name in kept)) continue;
    if (field.type === "checkbox") field.checked = kept[field.name] === true;
    else field.value = String(kept[field.name]);
  }
  form.addEventListener("change", () => {
    const values = [...form.elements].map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]);
    localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(values)));
  });
}

// Shows what holds for a field that is left empty. defaults are those of the chosen model, if it is loaded.
export function showDefaults(defaults) {
  for (const name of ["temperature", "top_p", "top_k"]) {
    const value = defaults?.[name];
    form.elements[name].placeholder = value === undefined ? "" : name === "top_k" && value === 0 ? "all" : String(value);
  }
}

function json(name, what) {
  const text = form.elements[name].value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}

// Returns the system text, whether answers must be JSON, and the fields of each request to send: one, or two that are
// compared, with a label each. Throws for a field that is not valid.
export function read() {
  const wrong = [...form.elements].find((field) => !field.checkValidity());
  if (wrong) throw new Error(`${wrong.closest("label").firstChild.textContent.trim()}: ${wrong.validationMessage}`);
  const fields = {};
  for (const name of NUMBERS) {
    if (form.elements[name].value !== "") fields[name] = Number(form.elements[name].value);
  }
  if (form.elements.logprobs.checked) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  const schema = json("schema", "JSON schema");
  if (schema !== undefined) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = json("tools", "Tools");
  if (tools !== undefined) fields.tools = tools;
  const requests = [{ fields, label: "" }];
  if (form.elements.second_temperature.value !== "") {
    const second = { ...fields, temperature: Number(form.elements.second_temperature.value) };
    requests[0].label = fields.temperature === undefined ? "default temperature" : `temperature ${fields.temperature}`;
    requests.push({ fields: second, label: `temperature ${second.temperature}` });
  }
  return { system: form.elements.system.value.trim(), isJson: schema !== undefined, requests };
}
