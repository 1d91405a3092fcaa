"""What each endpoint does, takes and returns, for /openapi.json. The routes in `app` pair these with the handlers."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import Struct

from penstock.frontend.schemas import answers
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.messages import CountTokensBody, MessagesBody
from penstock.frontend.schemas.responses import ResponsesBody
from penstock.frontend.schemas.utilities import DetokenizeBody, TokenizeBody

HTML, CSS, SCRIPT, TEXT = "text/html", "text/css", "text/javascript", "text/plain"


@dataclass(frozen=True, slots=True)
class EndpointDoc:
    """One endpoint. answer is the type of a JSON object, or another content type."""

    tag: str
    summary: str
    answer: type[Struct] | str
    body: type[Struct] | None = None
    events: type[Struct] | None = None
    """Type of a stream's events; None for an endpoint that cannot stream."""
    query: tuple[tuple[str, type, str], ...] = ()
    """Query parameters: name, type and meaning."""
    can_be_missing: bool = False
    """Whether what the path names may not exist (404)."""


CHAT = EndpointDoc(
    "Generation",
    "Answers a chat, whole or as server-sent events that end with [DONE].",
    answers.ChatAnswer,
    ChatBody,
    answers.ChatChunk,
)
COMPLETION = EndpointDoc(
    "Generation",
    "Completes texts or token ids, whole or as server-sent events that end with [DONE].",
    answers.CompletionAnswer,
    CompletionBody,
    answers.CompletionAnswer,
)
MESSAGE = EndpointDoc(
    "Generation", "Anthropic's Messages API.", answers.MessageAnswer, MessagesBody, answers.MessageEvent
)
COUNT_MESSAGE = EndpointDoc(
    "Tokens", "Counts the tokens of a message's input.", answers.CountTokensAnswer, CountTokensBody
)
RESPONSE = EndpointDoc(
    "Generation", "OpenAI's Responses API.", answers.ResponseAnswer, ResponsesBody, answers.ResponseEvent
)
COUNT_RESPONSE = EndpointDoc("Tokens", "Counts the tokens of a response's input.", answers.InputTokens, ResponsesBody)
RETRIEVE = EndpointDoc(
    "Kept responses",
    "Returns a kept response as it stands, or its events again.",
    answers.ResponseAnswer,
    events=answers.ResponseEvent,
    query=(
        ("stream", bool, "true: return its events."),
        ("starting_after", int, "Only the events after this sequence number."),
    ),
    can_be_missing=True,
)
DELETE = EndpointDoc(
    "Kept responses",
    "Deletes a response; cancels one that runs.",
    answers.DeletedResponse,
    can_be_missing=True,
)
CANCEL = EndpointDoc("Kept responses", "Cancels a background response.", answers.ResponseAnswer, can_be_missing=True)
INPUT_ITEMS = EndpointDoc(
    "Kept responses",
    "Lists the input items of a response, in pages.",
    answers.InputItems,
    query=(
        ("limit", int, "Items per page, 1 to 100; default 20."),
        ("order", str, "asc or desc; default desc."),
        ("after", str, "Only the items after the one with this id."),
    ),
    can_be_missing=True,
)
TOKENIZE = EndpointDoc("Tokens", "Returns the tokens of a text or a chat.", answers.TokenizeAnswer, TokenizeBody)
DETOKENIZE = EndpointDoc("Tokens", "Returns the text of tokens.", answers.DetokenizeAnswer, DetokenizeBody)
TEMPLATE = EndpointDoc("Tokens", "Returns a chat's prompt as text.", answers.TemplateAnswer, ChatBody)
MODELS = EndpointDoc("Server", "Lists the served model.", answers.ModelsAnswer)
MODEL = EndpointDoc("Server", "Describes the served model.", answers.ModelAnswer, can_be_missing=True)
VERSION = EndpointDoc("Server", "Returns this server's version.", answers.VersionAnswer)
LOAD = EndpointDoc(
    "Server", "Counts this worker's open requests and the whole system's sequences and pages.", answers.LoadAnswer
)
HEALTH = EndpointDoc("Server", "Whether this frontend process is alive.", answers.HealthAnswer)
READY = EndpointDoc("Server", "Whether requests can be answered.", answers.ReadyAnswer)
METRICS = EndpointDoc("Server", "Metrics in Prometheus' text format.", TEXT)
DOCUMENT = EndpointDoc("Server", "This document.", Struct)
PAGE = EndpointDoc("Server", "This document as a page.", HTML)
PAGE_SCRIPT = EndpointDoc("Server", "The page's script.", SCRIPT)
PAGE_STYLE = EndpointDoc("Server", "The page's style.", CSS)


_SCHEMA = "JSON schema for the answer, as an object or as text."
_TOOLS = "Functions that the model may call."
FIELDS = {
    "add_generation_prompt": "Whether the template begins the assistant's turn.",
    "add_special": "Whether the tokenizer adds its special tokens (llama.cpp's name).",
    "add_special_tokens": "Whether the tokenizer adds its special tokens.",
    "allowed_token_ids": "Only these tokens may be generated.",
    "background": "The response is generated without its client, which retrieves it by its id.",
    "bad_words": "Texts that must not be generated.",
    "best_of": "Candidates generated per prompt; the n likeliest are returned.",
    "cache_control": "Accepted, without effect.",
    "chat_template_kwargs": "Values for the chat template.",
    "content": "Text (llama.cpp's name).",
    "context_management": "Accepted, without effect.",
    "continue_final_message": "The answer continues the last message, which must be the assistant's.",
    "documents": "Passed to the chat template.",
    "echo": "The answer begins with the prompt.",
    "enable_thinking": "Passed to the chat template: whether the model reasons before it answers.",
    "frequency_penalty": "Makes tokens less likely the more often they have been generated.",
    "guided_choice": "The answer must be one of these texts.",
    "guided_grammar": "Grammar for the answer, in Lark's syntax.",
    "guided_json": _SCHEMA,
    "guided_regex": "Regular expression that the whole answer must match.",
    "ignore_eos": "The model's own end tokens do not stop the answer.",
    "include": "Additional output, such as message.output_text.logprobs.",
    "include_reasoning": "Whether the answer includes the reasoning.",
    "include_stop_str_in_output": "The answer includes the text or token that stopped it.",
    "inference_geo": "Accepted, without effect.",
    "input": "A text, or messages, calls and their results.",
    "instructions": "System message before the input.",
    "logit_bias": "Added to the logits of these tokens.",
    "logprobs": "Log probabilities of the generated tokens.",
    "max_completion_tokens": "Maximum tokens of the answer; overrides max_tokens.",
    "max_output_tokens": "Maximum tokens of the answer.",
    "max_tokens": "Maximum tokens of the answer.",
    "max_tool_calls": "Limits calls of built-in tools; this server has none.",
    "messages": "The chat so far.",
    "metadata": "Returned with the response.",
    "min_p": "Only tokens with at least this fraction of the top token's probability.",
    "min_tokens": "Nothing stops the answer before this many tokens.",
    "model": "Name of the served model; any other gets 404.",
    "n": "Answers per prompt.",
    "output_config": "Effort, and a schema for the answer.",
    "output_format": "The schema of output_config, by its older name.",
    "parallel_tool_calls": "Whether one answer may contain several calls.",
    "parse_special": "Names of special tokens are parsed as those tokens; always on.",
    "presence_penalty": "Makes tokens that have been generated less likely.",
    "previous_response_id": "A kept response that this one continues.",
    "priority": "Lower runs sooner, if the backend has a --priority-step-s above 0.",
    "prompt": "A text or several, or a list of token ids or several.",
    "prompt_cache_key": "Accepted, without effect.",
    "prompt_cache_options": "Accepted, without effect.",
    "prompt_cache_retention": "Accepted, without effect.",
    "prompt_logprobs": "Top tokens to report at each position of the prompt.",
    "reasoning": "How much the model reasons.",
    "reasoning_effort": "How much the model reasons; passed to the chat template.",
    "repetition_penalty": "Above 1, makes tokens of prompt and answer less likely.",
    "response_format": "Text, any JSON object, or JSON that follows a schema.",
    "return_timings": "Report timings in the body.",
    "return_token_ids": "Return the token ids of prompt and answer.",
    "return_token_strs": "Return the tokens' texts as well.",
    "safety_identifier": "Accepted, without effect.",
    "seed": "The same request with the same seed gives the same answer.",
    "service_tier": "Accepted, without effect.",
    "skip_special_tokens": "Special tokens produce no text.",
    "spaces_between_special_tokens": "Accepted, without effect.",
    "speed": "Accepted, without effect.",
    "stop": "Texts that stop the answer.",
    "stop_sequences": "Texts that stop the answer.",
    "stop_token_ids": "Tokens that stop the answer.",
    "store": "Whether a response is kept.",
    "stream": "Server-sent events as the answer is generated.",
    "stream_options": "Whether a stream reports its usage, at the end or in every chunk.",
    "structured_outputs": "Constraint on the answer: one of json, regex, choice, grammar and json_object.",
    "system": "System message before the messages.",
    "temperature": "0 is greedy; above 1 flattens the distribution.",
    "text": "The answer's format.",
    "thinking": "Whether the model reasons, and for how many tokens.",
    "thinking_budget": "Maximum tokens of reasoning; then its end is forced.",
    "thinking_token_budget": "Another name for thinking_budget.",
    "timeout_ms": "Milliseconds after which the request ends, in any state.",
    "timings_per_token": "Report timings in every chunk.",
    "tokens": "Token ids.",
    "tool_choice": "Whether functions may or must be called, or which one.",
    "tools": _TOOLS,
    "top_k": "Only the k likeliest tokens; 0 and -1 are off.",
    "top_logprobs": "Top tokens to report at each position of the answer.",
    "top_p": "Only the likeliest tokens that together have this probability.",
    "truncate_prompt_tokens": "Prompt tokens to keep; -1 keeps as many as leave space for the answer.",
    "truncation": "auto drops the oldest turns if the conversation does not fit.",
    "truncation_side": "Side at which the prompt is cut.",
    "typical_p": "Locally typical sampling: keeps tokens up to this probability.",
    "user": "Accepted, without effect.",
    "with_pieces": "Return the tokens' texts as well (llama.cpp's name).",
}


def names(body: type[Struct]) -> set[str]:
    """Return a body's fields that have an effect. Fields that are refused by name are declared as raw JSON."""
    return {field.name for field in msgspec.structs.fields(body) if field.type is not msgspec.Raw}
