// Runs the quick start of one client against a server, and prints what it got as JSON.
// Arguments: the client's name and http://HOST:PORT/v1.
const [client, url] = process.argv.slice(2);
const model = "penstock-demo";
const question = "What does os.path.join do?";
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};

async function openai() {
  const { default: OpenAI } = await import("openai");
  const api = new OpenAI({ baseURL: url, apiKey: "none" });
  const messages = [{ role: "user", content: question }];
  const common = { model, messages, max_tokens: 24, temperature: 0 };
  const whole = await api.chat.completions.create(common);
  let streamed = "";
  for await (const chunk of await api.chat.completions.create({ ...common, stream: true })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
  }
  const tools = [{ type: "function", function: { name: "weather", parameters } }];
  const called = await api.chat.completions.create({ ...common, max_tokens: 200, tools, tool_choice: "required" });
  const call = called.choices[0].message.tool_calls[0].function;
  const events = [];
  for await (const event of await api.responses.create({ model, input: question, max_output_tokens: 24, temperature: 0, stream: true })) {
    events.push(event.type);
  }
  let refusal = 0;
  await api.chat.completions.create({ ...common, temperature: 9 }).catch((error) => (refusal = error.status));
  return {
    text: whole.choices[0].message.content,
    streamed,
    call: { name: call.name, arguments: JSON.parse(call.arguments) },
    lastEvent: events.at(-1),
    refusal,
  };
}

async function aiSdk(makeModel) {
  const { generateText, streamText, generateObject, tool, jsonSchema } = await import("ai");
  const common = { model: await makeModel(), prompt: question, maxOutputTokens: 24, temperature: 0, maxRetries: 0 };
  const { text } = await generateText(common);
  let streamed = "";
  for await (const piece of streamText(common).textStream) streamed += piece;
  const called = await generateText({
    ...common,
    maxOutputTokens: 200,
    tools: { weather: tool({ description: "The weather.", inputSchema: jsonSchema(parameters) }) },
    toolChoice: "required",
  });
  const call = called.toolCalls[0];
  return { text, streamed, call: { name: call.toolName, arguments: call.input } };
}

async function compatible() {
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  return aiSdk(async () => createOpenAICompatible({ name: "penstock", baseURL: url, apiKey: "none" })(model));
}

async function anthropic() {
  const { createAnthropic } = await import("@ai-sdk/anthropic");
  return aiSdk(async () => createAnthropic({ baseURL: url, apiKey: "none" })(model));
}

async function langchain() {
  const { ChatOpenAI } = await import("@langchain/openai");
  const chat = new ChatOpenAI({ model, maxTokens: 24, temperature: 0, apiKey: "none", configuration: { baseURL: url } });
  const { content: text } = await chat.invoke(question);
  let streamed = "";
  for await (const piece of await chat.stream(question)) streamed += piece.content;
  const caller = new ChatOpenAI({ model, maxTokens: 200, temperature: 0, apiKey: "none", configuration: { baseURL: url } });
  const weather = { type: "function", function: { name: "weather", description: "The weather.", parameters } };
  const called = await caller.bindTools([weather], { tool_choice: "required" }).invoke(question);
  const call = called.tool_calls[0];
  return { text, streamed, call: { name: call.name, arguments: call.args } };
}

async function ollama() {
  const { Ollama } = await import("ollama");
  const api = new Ollama({ host: url.replace(/\/v1$/, "") });
  const common = { model, messages: [{ role: "user", content: question }], options: { num_predict: 24, temperature: 0 } };
  const whole = await api.chat(common);
  let streamed = "";
  for await (const part of await api.chat({ ...common, stream: true })) streamed += part.message.content;
  const generated = await api.generate({ model, prompt: question, options: common.options });
  const { embeddings } = await api.embed({ model: `${model}-embed`, input: [question] });
  const { models } = await api.list();
  let refusal = 0;
  await api.chat({ ...common, options: { temperature: 9 } }).catch((error) => (refusal = error.status_code));
  return {
    text: whole.message.content,
    streamed,
    generated: generated.response,
    dimensions: embeddings[0].length,
    models: models.map((each) => each.name),
    refusal,
  };
}

const clients = { ollama, openai, "ai-sdk-compatible": compatible, "ai-sdk-anthropic": anthropic, langchain };
console.log(JSON.stringify(await clients[client]()));
