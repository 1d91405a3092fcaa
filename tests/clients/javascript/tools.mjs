// Asks one client for a call by tool_choice auto, required and by name, whole and streamed, and prints the calls as JSON.
// Arguments: the client's name, http://HOST:PORT and the model.
const [client, url, model] = process.argv.slice(2);
const name = "get_weather";
const description = "The weather of a city.";
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const [first, second] = ["What is the weather in Paris?", "What is the weather in Rome?"];
const given = { city: "Paris" };
const result = JSON.stringify({ sky: "sunny" });
const told = "It is sunny in Paris.";
const text = JSON.stringify(given);
const id = "call_1";
const keys = { apiKey: "none", maxRetries: 0 };
const limits = { max_tokens: 60, temperature: 0 };
const call = (name, args) => ({ name, arguments: typeof args === "string" ? JSON.parse(args) : args });

const chat = [
  { role: "user", content: first },
  { role: "assistant", content: null, tool_calls: [{ id, type: "function", function: { name, arguments: text } }] },
  { role: "tool", tool_call_id: id, content: result },
  { role: "assistant", content: told },
  { role: "user", content: second },
];
const messages = [
  { role: "user", content: first },
  { role: "assistant", content: [{ type: "tool_use", id, name, input: given }] },
  { role: "user", content: [{ type: "tool_result", tool_use_id: id, content: result }] },
  { role: "assistant", content: told },
  { role: "user", content: second },
];
const items = [
  { role: "user", content: first },
  { type: "function_call", call_id: id, name, arguments: text },
  { type: "function_call_output", call_id: id, output: result },
  { role: "assistant", content: told },
  { role: "user", content: second },
];

async function openaiChat(choice, streams) {
  const { default: OpenAI } = await import("openai");
  const api = new OpenAI({ baseURL: `${url}/v1`, ...keys }).chat.completions;
  const body = {
    model,
    messages: chat,
    tools: [{ type: "function", function: { name, description, parameters } }],
    tool_choice: choice === "named" ? { type: "function", function: { name } } : choice,
    parallel_tool_calls: false,
    ...limits,
  };
  const answer = streams ? await api.stream(body).finalChatCompletion() : await api.create(body);
  return answer.choices[0].message.tool_calls.map((made) => call(made.function.name, made.function.arguments));
}

async function openaiResponses(choice, streams) {
  const { default: OpenAI } = await import("openai");
  const api = new OpenAI({ baseURL: `${url}/v1`, ...keys }).responses;
  const body = {
    model,
    input: items,
    tools: [{ type: "function", name, description, parameters, strict: false }],
    tool_choice: choice === "named" ? { type: "function", name } : choice,
    parallel_tool_calls: false,
    max_output_tokens: 60,
    temperature: 0,
  };
  const answer = streams ? await api.stream(body).finalResponse() : await api.create(body);
  return answer.output.filter((item) => item.type === "function_call").map((item) => call(item.name, item.arguments));
}

async function anthropic(choice, streams) {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const api = new Anthropic({ baseURL: url, ...keys }).messages;
  const types = { auto: { type: "auto" }, required: { type: "any" }, named: { type: "tool", name } };
  const body = {
    model,
    messages,
    tools: [{ name, description, input_schema: parameters }],
    tool_choice: { ...types[choice], disable_parallel_tool_use: true },
    ...limits,
  };
  const answer = streams ? await api.stream(body).finalMessage() : await api.create(body);
  return answer.content.filter((block) => block.type === "tool_use").map((block) => call(block.name, block.input));
}

const aiSdk = (makeModel, providerOptions) => async (choice, streams) => {
  const { generateText, streamText, tool, jsonSchema } = await import("ai");
  const output = { type: "json", value: JSON.parse(result) };
  const options = {
    model: await makeModel(),
    messages: [
      { role: "user", content: first },
      { role: "assistant", content: [{ type: "tool-call", toolCallId: id, toolName: name, input: given }] },
      { role: "tool", content: [{ type: "tool-result", toolCallId: id, toolName: name, output }] },
      { role: "assistant", content: told },
      { role: "user", content: second },
    ],
    tools: { [name]: tool({ description, inputSchema: jsonSchema(parameters) }) },
    toolChoice: choice === "named" ? { type: "tool", toolName: name } : choice,
    maxOutputTokens: 60,
    temperature: 0,
    maxRetries: 0,
    providerOptions,
  };
  const calls = await (streams ? streamText(options) : await generateText(options)).toolCalls;
  return calls.map((made) => call(made.toolName, made.input));
};

const aiSdkCompatible = aiSdk(
  async () => {
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    return createOpenAICompatible({ name: "penstock", baseURL: `${url}/v1`, apiKey: "none" })(model);
  },
  { penstock: { parallel_tool_calls: false } },
);

const aiSdkOpenai = (kind) =>
  aiSdk(
    async () => {
      const { createOpenAI } = await import("@ai-sdk/openai");
      return createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })[kind](model);
    },
    { openai: { parallelToolCalls: false } },
  );

const aiSdkAnthropic = aiSdk(
  async () => {
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    return createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model);
  },
  { anthropic: { disableParallelToolUse: true } },
);

const langchain = (makeModel) => async (choice, streams) => {
  const { HumanMessage, AIMessage, ToolMessage } = await import("@langchain/core/messages");
  const { tool } = await import("@langchain/core/tools");
  const bound = (await makeModel()).bindTools([tool(() => result, { name, description, schema: parameters })], {
    tool_choice: { auto: "auto", required: "any", named: name }[choice],
  });
  const asked = [
    new HumanMessage(first),
    new AIMessage({ content: "", tool_calls: [{ id, name, args: given }] }),
    new ToolMessage({ content: result, tool_call_id: id }),
    new AIMessage(told),
    new HumanMessage(second),
  ];
  if (!streams) return (await bound.invoke(asked)).tool_calls.map((made) => call(made.name, made.args));
  let answer;
  for await (const piece of await bound.stream(asked)) answer = answer === undefined ? piece : answer.concat(piece);
  return answer.tool_calls.map((made) => call(made.name, made.args));
};

const langchainOpenai = (useResponsesApi) =>
  langchain(async () => {
    const { ChatOpenAI } = await import("@langchain/openai");
    const configuration = { baseURL: `${url}/v1` };
    return new ChatOpenAI({ model, maxTokens: 60, temperature: 0, configuration, useResponsesApi, ...keys });
  });

const langchainAnthropic = langchain(async () => {
  const { ChatAnthropic } = await import("@langchain/anthropic");
  return new ChatAnthropic({ model, maxTokens: 60, temperature: 0, anthropicApiUrl: url, ...keys });
});

const clients = {
  "openai-chat": openaiChat,
  "openai-responses": openaiResponses,
  anthropic,
  "ai-sdk-compatible": aiSdkCompatible,
  "ai-sdk-chat": aiSdkOpenai("chat"),
  "ai-sdk-responses": aiSdkOpenai("responses"),
  "ai-sdk-anthropic": aiSdkAnthropic,
  "langchain-chat": langchainOpenai(false),
  "langchain-responses": langchainOpenai(true),
  "langchain-anthropic": langchainAnthropic,
};
const calls = {};
for (const choice of ["auto", "required", "named"]) {
  calls[choice] = [await clients[client](choice, false), await clients[client](choice, true)];
}
console.log(JSON.stringify(calls));
