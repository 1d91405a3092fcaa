// From a conversation and the settings to the requests that answer its last message.
import { newAnswer, toMessage } from "/page/answer.js";
import { refusal } from "/page/models.js";
import { partOf } from "/page/pictures.js";
import * as settings from "/page/settings.js";
import { newRequest } from "/page/streams.js";
import { add, path } from "/page/tree.js";

const REPORTED = { stream: true, stream_options: { include_usage: true }, return_token_ids: true };
const MOST_SEED = 2 ** 31;

function withFiles(message) {
  const files = message.files ?? [];
  const texts = files.filter((file) => !file.blob).map(({ name, text }) => `File ${name}:\n\`\`\`\n${text}\n\`\`\``);
  const content = [message.content, ...texts].filter(Boolean).join("\n\n");
  const pictures = files.flatMap((file, index) => (file.blob ? [partOf(message, index)] : []));
  return pictures.length ? [...pictures, ...(content ? [{ type: "text", text: content }] : [])] : content;
}

function toApi(message) {
  if (message.role === "assistant") return toMessage(message.answers[message.chosen]);
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
  return { role: "user", content: withFiles(message) };
}

function history(conversation, leaf, system) {
  const before = path(conversation, leaf).map(toApi);
  return system ? [{ role: "system", content: system }, ...before] : before;
}

// Every request has a seed, so that it can be repeated exactly.
const seeded = (fields) => ({ seed: Math.floor(Math.random() * MOST_SEED), ...fields });

// Throws for settings that are not valid, and if a model that they name cannot answer these messages.
export function check(messages, model) {
  const { requests } = settings.read(model);
  const picture = messages.flatMap((each) => each.files ?? []).find((file) => file.blob);
  const problem = picture && requests.map(({ fields }) => refusal(fields.model, picture.name)).find(Boolean);
  if (problem) throw new Error(problem);
}

// Adds a message of answers after the one with the id parent, with a request for each of the compared settings. The model is
// the one to ask where the settings name no other. Throws for settings that are not valid.
export function addAnswers(conversation, parent, model) {
  const { isJson, requests } = settings.read(model);
  const groups = requests.map(({ fields, label }) => Array.from({ length: fields.n ?? 1 }, () => newAnswer(isJson, label)));
  const answers = groups.flat();
  const models = [...new Set(requests.map((each) => each.fields.model))];
  const made = add(conversation, parent, { role: "assistant", model: models.join(" and "), chosen: 0, answers, requests: [] });
  let first = 0;
  requests.forEach(({ fields, system }, index) => {
    const count = groups[index].length;
    const body = { ...seeded(fields), messages: history(conversation, parent, system), ...REPORTED };
    made.requests.push(newRequest(body, answers, first, count));
    first += count;
  });
  return made;
}

// Adds a request that continues the message's chosen answer where it was cut.
export function addContinuation(conversation, message) {
  const index = message.chosen;
  const answer = message.answers[index];
  const request = message.requests.findLast((each) => each.first <= index && index < each.first + each.count);
  const { n, ...body } = JSON.parse(request.body);
  const before = body.continue_final_message ? body.messages.slice(0, -1) : body.messages;
  const messages = [...before, { role: "assistant", content: answer.content }];
  const options = { continue_final_message: true, add_generation_prompt: false };
  message.requests.push(newRequest({ ...body, messages, ...options }, message.answers, index, 1));
}

// Adds a message for each result of the chosen answer's calls. Returns the last one.
export function addResults(conversation, message, results) {
  const { calls } = message.answers[message.chosen];
  return calls.map(({ id, name }, index) =>
    add(conversation, conversation.leaf, { role: "tool", callId: id, name, content: results[index] }));
}
