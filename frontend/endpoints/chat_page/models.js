// The served models that write text, and what they take.
import { request } from "/page/api.js";

let models = []; // the API's objects

// Throws ApiError.
export async function load() {
  const { data } = await (await request("/v1/models")).json();
  models = data.filter((model) => model.capabilities?.structured_output !== false);
  return models.map((model) => model.id);
}

export const model = (name) => models.find((each) => each.id === name);

// Why the model does not take the picture with this name, or null.
export function refusal(name, picture) {
  const takes = model(name)?.input_modalities?.includes("image");
  return takes ? null : `${name} takes only text, no pictures such as ${picture}.`;
}
