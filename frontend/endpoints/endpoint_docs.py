"""What each endpoint is for, takes and answers: beside its handler in the routes, and so in /openapi.json."""

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
    """One endpoint. answer is a JSON object's type, or another content type."""

    tag: str
    summary: str
    answer: type[Struct] | str
    body: type[Struct] | None = None
    events: type[Struct] | None = None
    """What the events of a stream hold, where one can be asked for."""
    query: tuple[tuple[str, type, str], ...] = ()
    """Name, type and meaning."""
    can_be_missing: bool = False
    """What the path names need not be there."""


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
    "Tokens", "How many tokens a message's input has.", answers.CountTokensAnswer, CountTokensBody
)
RESPONSE = EndpointDoc(
    "Generation", "OpenAI's Responses API.", answers.ResponseAnswer, ResponsesBody, answers.ResponseEvent
)
COUNT_RESPONSE = EndpointDoc("Tokens", "How many tokens a response's input has.", answers.InputTokens, ResponsesBody)
RETRIEVE = EndpointDoc(
    "Kept responses",
    "A response that is kept, as it stands; or its events once more.",
    answers.ResponseAnswer,
    events=answers.ResponseEvent,
    query=(
        ("stream", bool, "true: its events"),
        ("starting_after", int, "Only the events behind this sequence number."),
    ),
    can_be_missing=True,
)
DELETE = EndpointDoc(
    "Kept responses", "Forgets a response; one that runs is cancelled.", answers.DeletedResponse, can_be_missing=True
)
CANCEL = EndpointDoc(
    "Kept responses", "Cancels a response in the background.", answers.ResponseAnswer, can_be_missing=True
)
INPUT_ITEMS = EndpointDoc(
    "Kept responses",
    "The input of a response, in pages.",
    answers.InputItems,
    query=(
        ("limit", int, "Items of a page, 1 to 100; 20 unless said."),
        ("order", str, "asc or desc, which is the default."),
        ("after", str, "Only the items behind the one with this id."),
    ),
    can_be_missing=True,
)
TOKENIZE = EndpointDoc("Tokens", "The tokens of a text or a chat.", answers.TokenizeAnswer, TokenizeBody)
DETOKENIZE = EndpointDoc("Tokens", "The text of tokens.", answers.DetokenizeAnswer, DetokenizeBody)
TEMPLATE = EndpointDoc("Tokens", "A chat's prompt as text.", answers.TemplateAnswer, ChatBody)
MODELS = EndpointDoc("Server", "The model that is served, in a list.", answers.ModelsAnswer)
MODEL = EndpointDoc("Server", "The model that is served.", answers.ModelAnswer, can_be_missing=True)
VERSION = EndpointDoc("Server", "This server's version.", answers.VersionAnswer)
LOAD = EndpointDoc(
    "Server", "How many requests are open in this worker, and what the whole system runs.", answers.LoadAnswer
)
HEALTH = EndpointDoc("Server", "Whether this frontend process lives.", answers.HealthAnswer)
READY = EndpointDoc("Server", "Whether requests can be answered.", answers.ReadyAnswer)
METRICS = EndpointDoc("Server", "Numbers in Prometheus' text format.", TEXT)
DOCUMENT = EndpointDoc("Server", "This document.", Struct)
PAGE = EndpointDoc("Server", "This document as a page.", HTML)
PAGE_SCRIPT = EndpointDoc("Server", "The page's script.", SCRIPT)
PAGE_STYLE = EndpointDoc("Server", "The page's style.", CSS)


_SCHEMA = "JSON schema that the answer follows, as an object or as text."
_TOOLS = "Functions that the model may call."
FIELDS = {
    "add_generation_prompt": "Whether the template begins the assistant's turn.",
    "add_special": "Whether the tokenizer adds its special tokens (llama.cpp's name).",
    "add_special_tokens": "Whether the tokenizer adds its special tokens.",
    "allowed_token_ids": "Only these tokens are generated.",
    "background": "The response runs on without its client, who asks for it by its id.",
    "bad_words": "Texts that are not generated.",
    "best_of": "Candidates of each prompt, of which the n likeliest are answered.",
    "cache_control": "Taken, of no effect.",
    "chat_template_kwargs": "Values for the chat template.",
    "content": "Text (llama.cpp's name).",
    "context_management": "Taken, of no effect.",
    "continue_final_message": "The answer goes on where the last message, the assistant's, ends.",
    "documents": "Given to the chat template.",
    "echo": "The prompt stands before the answer.",
    "enable_thinking": "Given to the chat template: whether the model reasons before it answers.",
    "frequency_penalty": "Makes tokens less likely by how often they have been generated.",
    "guided_choice": "The answer is one of these texts.",
    "guided_grammar": "Grammar in Lark's syntax that the answer follows.",
    "guided_json": _SCHEMA,
    "guided_regex": "Regular expression that the whole answer matches.",
    "ignore_eos": "The model's own end tokens do not end the answer.",
    "include": "What else the response tells, such as message.output_text.logprobs.",
    "include_reasoning": "Whether the reasoning is told.",
    "include_stop_str_in_output": "What ended the answer is a part of it.",
    "inference_geo": "Taken, of no effect.",
    "input": "A text, or messages, calls and their results.",
    "instructions": "What the system says before the input.",
    "logit_bias": "Added to the logits of these tokens.",
    "logprobs": "Log probabilities of the generated tokens.",
    "max_completion_tokens": "Most tokens of the answer; goes before max_tokens.",
    "max_output_tokens": "Most tokens of the answer.",
    "max_tokens": "Most tokens of the answer.",
    "max_tool_calls": "Counts calls of built-in tools, of which there are none.",
    "messages": "The chat so far.",
    "metadata": "Taken; a response tells it again.",
    "min_p": "Only tokens that are at least this times as likely as the likeliest.",
    "min_tokens": "Nothing ends the answer before so many tokens.",
    "model": "The served model's name; another is answered 404.",
    "n": "Answers to each prompt.",
    "output_config": "Effort, and a schema that the answer follows.",
    "output_format": "The schema of output_config, by its older name.",
    "parallel_tool_calls": "Whether one answer may hold several calls.",
    "parse_special": "Names of special tokens are read as those tokens; always.",
    "presence_penalty": "Makes tokens less likely that have been generated.",
    "previous_response_id": "A kept response that this one goes on from.",
    "priority": "Lower runs sooner, where the backend has a --priority-step-s above 0.",
    "prompt": "A text, several, a list of token ids, or several.",
    "prompt_cache_key": "Taken, of no effect.",
    "prompt_cache_options": "Taken, of no effect.",
    "prompt_cache_retention": "Taken, of no effect.",
    "prompt_logprobs": "Likeliest tokens that are told at each place of the prompt.",
    "reasoning": "How much the model reasons.",
    "reasoning_effort": "How much the model reasons; given to the chat template.",
    "repetition_penalty": "Above 1 makes tokens of prompt and answer less likely.",
    "response_format": "Text, any JSON object, or JSON by a schema.",
    "return_timings": "Where the time went, in the body.",
    "return_token_ids": "Token ids of prompt and answer.",
    "return_token_strs": "The tokens' texts as well.",
    "safety_identifier": "Taken, of no effect.",
    "seed": "The same request with the same seed gives the same answer.",
    "service_tier": "Taken, of no effect.",
    "skip_special_tokens": "Special tokens leave no text.",
    "spaces_between_special_tokens": "Taken, of no effect.",
    "speed": "Taken, of no effect.",
    "stop": "Texts that end the answer.",
    "stop_sequences": "Texts that end the answer.",
    "stop_token_ids": "Tokens that end the answer.",
    "store": "Whether a response is kept.",
    "stream": "Server-sent events as the answer is generated.",
    "stream_options": "Whether a stream tells its usage, at the end or in every chunk.",
    "structured_outputs": "One of json, regex, choice, grammar and json_object, which the answer follows.",
    "system": "What the system says before the messages.",
    "temperature": "0 is greedy; above 1 flattens the distribution.",
    "text": "The answer's format.",
    "thinking": "Whether the model reasons, and for how many tokens.",
    "thinking_budget": "Tokens of reasoning after which its end is forced.",
    "thinking_token_budget": "The same, by another name.",
    "timeout_ms": "Milliseconds after which the request ends, wherever it is.",
    "timings_per_token": "Where the time went, in every chunk.",
    "tokens": "Token ids.",
    "tool_choice": "Whether functions may or must be called, or which one.",
    "tools": _TOOLS,
    "top_k": "Only the k likeliest tokens; 0 and -1 are off.",
    "top_logprobs": "Likeliest tokens that are told at each place of the answer.",
    "top_p": "Only the likeliest tokens that make up this share.",
    "truncate_prompt_tokens": "Prompt tokens that are kept; -1 is as many as leave room for the answer.",
    "truncation": "auto leaves the oldest turns out where they do not fit.",
    "truncation_side": "The side at which a prompt is cut.",
    "typical_p": "Only tokens of about the expected surprise, to this share.",
    "user": "Taken, of no effect.",
    "with_pieces": "The tokens' texts as well (llama.cpp's name).",
}


def names(body: type[Struct]) -> set[str]:
    """The fields of a body that do something: those that are refused by name are declared as raw JSON."""
    return {field.name for field in msgspec.structs.fields(body) if field.type is not msgspec.Raw}
