"""Writes answers in the formats of the endpoints: one module per API, each with a class that implements `base.Format`.

`chat` and `completion` are OpenAI's older APIs and share `openai_chunks`; `responses` is OpenAI's Responses API,
`messages` Anthropic's. `logprobs` has the three shapes of log probabilities. A format returns bytes and never touches a
connection. May import parsing, schemas and what lies below. Start with `base`, then `chat`.
"""
