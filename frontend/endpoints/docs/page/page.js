// Renders /openapi.json. All text of the document is inserted as text, never as markup.
import { request, setKey } from "/page/api.js";
import { element } from "/docs/element.js";
import { TryForm } from "/docs/try.js";

const BOUNDS = [
  ["minimum", "≥ "], ["exclusiveMinimum", "> "], ["maximum", "≤ "], ["exclusiveMaximum", "< "],
  ["minLength", "characters ≥ "], ["maxLength", "characters ≤ "], ["minItems", "items ≥ "], ["maxItems", "items ≤ "],
  ["maxProperties", "entries ≤ "], ["pattern", "matches "],
];

const CAN = { Embeddings: ["embeddings", "sparse_embeddings"], "Reranking and classification": ["rerank", "classify"] };

const at = (id) => document.getElementById(id);
const searched = new Map(); // endpoint → its text
let models = []; // of this server, once they are known

function resolve(schema, components) {
  return schema.$ref ? { name: schema.$ref.split("/").pop(), ...components[schema.$ref.split("/").pop()] } : schema;
}

function typeOf(schema, components) {
  const found = resolve(schema, components);
  if (found.anyOf) return found.anyOf.map((each) => typeOf(each, components)).filter((each) => each !== "null").join(" | ");
  if ("const" in found) return JSON.stringify(found.const);
  if (found.enum) return found.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (found.name) return found.name;
  if (found.type === "array") return `[${found.items ? typeOf(found.items, components) : "any"}]`;
  return found.type || "any";
}

function boundsOf(schema) {
  const own = BOUNDS.filter(([key]) => key in schema).map(([key, words]) => words + schema[key]);
  return [...own, ...(schema.anyOf || []).map(boundsOf)].filter(Boolean).join(", ");
}

function partsOf(schema, components) {
  // The named objects inside a field; each is shown once.
  const found = [];
  const walk = (each) => {
    if (each.$ref) found.push(each.$ref.split("/").pop());
    for (const inner of each.anyOf || []) walk(inner);
    if (each.items) walk(each.items);
  };
  walk(schema);
  return found.filter((name) => components[name]);
}

function fieldTable(schema, components) {
  const rows = Object.entries(schema.properties || {}).map(([name, field]) => {
    const left = element("td", {}, element("code", {}, name));
    if ((schema.required || []).includes(name)) left.append(" ", element("span", { class: "required" }, "required"));
    const kind = element("td", {}, element("code", {}, typeOf(field, components)));
    const bounds = boundsOf(field);
    if (bounds) kind.append(element("div", { class: "bounds" }, bounds));
    return element("tr", {}, left, kind, element("td", {}, field.description || ""));
  });
  const head = element("tr", {}, element("th", {}, "field"), element("th", {}, "type and bounds"), element("th", {}, "what"));
  return element("table", {}, head, ...rows);
}

function objects(name, components, seen) {
  // The table of the object, followed by those of the objects in it.
  if (seen.has(name)) return [];
  seen.add(name);
  const schema = components[name];
  const shown = [];
  if (seen.size > 1) shown.push(element("h3", {}, name));
  if (schema.description) shown.push(element("p", {}, schema.description.split("\n")[0]));
  if (schema.properties) shown.push(fieldTable(schema, components));
  for (const field of Object.values(schema.properties || {})) {
    for (const inner of partsOf(field, components)) shown.push(...objects(inner, components, seen));
  }
  return shown;
}

function contents(content, components) {
  return Object.entries(content || {}).flatMap(([kind, { schema }]) => {
    const names = partsOf(schema, components);
    const isText = !names.length && schema.type !== "array";
    const seen = new Set();
    const shown = [element("p", {}, element("code", {}, kind), isText ? "" : ` ${typeOf(schema, components)}`)];
    return [...shown, ...names.flatMap((name) => objects(name, components, seen))];
  });
}

// The model that an endpoint's examples name: one that can do what the endpoint does. "" if there is none.
function modelFor(tag) {
  const can = ({ capabilities = {} }) => (CAN[tag] ?? ["structured_output"]).some((each) => capabilities[each]);
  const found = models.find(can) ?? (tag in CAN ? undefined : models[0]);
  return found?.id ?? "";
}

function endpoint(path, method, operation, components) {
  const needsKey = operation.security.length > 0;
  const inside = element("div", { class: "inside" });
  const parameters = operation.parameters || [];
  if (parameters.length) {
    const schema = { properties: {}, required: [] };
    for (const each of parameters) {
      schema.properties[each.name] = { description: `${each.in}. ${each.description || ""}`, ...each.schema };
      if (each.required) schema.required.push(each.name);
    }
    inside.append(element("h3", {}, "Parameters"), fieldTable(schema, components));
  }
  if (operation.requestBody) {
    inside.append(element("h3", {}, "Body"), ...contents(operation.requestBody.content, components));
  }
  inside.append(element("h3", {}, "Answer"), ...contents(operation.responses["200"].content, components));
  const errors = Object.entries(operation.responses).filter(([status]) => status !== "200");
  inside.append(element("h3", {}, "Errors"));
  const rows = errors.map(([status, each]) =>
    element("tr", {}, element("td", {}, element("code", {}, status)), element("td", {}, each.description)));
  inside.append(element("table", {}, ...rows));
  const summary = element("summary", {},
    element("span", { class: "method" }, method.toUpperCase()), element("code", {}, path),
    element("span", {}, operation.summary), element("span", { class: "needs-key" }, needsKey ? "key" : ""));
  const made = element("details", { id: operation.operationId, class: "endpoint" }, summary);
  searched.set(made, `${summary.textContent} ${inside.textContent}`.toLowerCase());
  made.addEventListener("toggle", async () => {
    if (!made.open) return;
    made.append(inside); // what is closed costs the browser nothing
    await modelsLoaded; // the example names one
    if (!inside.querySelector(".try")) inside.prepend(new TryForm(path, method, operation, components, modelFor(operation.tags[0]), askForKey).node);
  });
  return made;
}

function render(openapi) {
  const components = openapi.components.schemas;
  for (const { name } of openapi.tags) {
    const section = element("section", {}, element("h2", {}, name));
    for (const [path, methods] of Object.entries(openapi.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        if (operation.tags.includes(name)) section.append(endpoint(path, method, operation, components));
      }
    }
    at("endpoints").append(section);
  }
  at("about").replaceChildren(
    `${openapi.info.description} Version ${openapi.info.version}, `, element("a", { href: "/openapi.json" }, "/openapi.json"));
  const target = location.hash && at(location.hash.slice(1));
  if (target) {
    target.open = true;
    target.querySelector("summary").scrollIntoView({ block: "nearest" });
  }
}

// Models and the key

function notify(text) {
  at("notice").textContent = text;
  at("notice").hidden = !text;
}

function askForKey() {
  notify("This server needs an API key: it is missing or wrong.");
  at("key").focus();
}

async function loadModels() {
  try {
    models = (await (await request("/v1/models")).json()).data;
    at("model").textContent = models.map(({ id }) => id).join(", ");
    notify("");
  } catch (error) {
    if (error.status === 401) askForKey();
    else notify(error.message);
  }
}

// Events of the page

at("filter").addEventListener("input", () => {
  const query = at("filter").value.trim().toLowerCase();
  for (const section of document.querySelectorAll("section")) {
    const shown = [...section.querySelectorAll(".endpoint")].filter((each) => {
      each.hidden = query !== "" && !searched.get(each).includes(query);
      return !each.hidden;
    });
    section.hidden = !shown.length;
  }
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value);
  at("key").value = "";
  modelsLoaded = loadModels();
});

let modelsLoaded = loadModels();
fetch("/openapi.json").then((answer) => answer.json()).then(render).catch((error) => {
  at("about").textContent = `/openapi.json could not be loaded: ${error.message}`;
});
