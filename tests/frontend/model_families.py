"""Models that call tools and reason, as a frontend sees them: chat templates like those of real model families, and
tokenizers with their marks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from penstock.frontend.app import App
from penstock.frontend.generation.served_model import ModelKeeper, ServedModel
from penstock.frontend.settings import ParserNames
from penstock.shm.client import GenerationRequest, TokenBatch
from penstock.shm.messages import Finish
from tests.frontend.harness import FakeBackend, Script, byte_level_tokenizer, make_app, model_card, served_model

HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call functions within <tools></tools>:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nFor each call return <tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set called = call.function or call %}
            {{- '\\n<tool_call>\\n{"name": "' + called.name + '", "arguments": ' }}
            {{- called.arguments if called.arguments is string else called.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

THINKING_HERMES = (
    HERMES
    + """\
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""
)
"""The model itself writes <think>."""

ALWAYS_THINKING = HERMES + "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}{# </think> #}"
"""The prompt ends with <think>."""

LLAMA3 = """\
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|im_start|>ipython\\n' + (message.content | tojson) + '<|im_end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model calls one tool at a time') }}
        {%- endif %}
        {%- set called = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n{"name": "' + called.name + '", "parameters": ' }}
        {{- (called.arguments | tojson) + '}<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.last and tools is not none and tools %}
            {{- 'Respond with {"name": function name, "parameters": its arguments}:\\n' }}
            {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if loop.last and tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('The id of a call has 9 characters') }}
            {%- endif %}
            {{- call.function | tojson | trim('}') + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
"""

PYTHONIC = LLAMA3.replace(
    'Respond with {"name": function name, "parameters": its arguments}',
    "Respond with [func_name1(name1=value1, name2=value2), func_name2()]",
)


@dataclass(frozen=True)
class Model:
    """A served model and its tokenizer."""

    template: str = HERMES
    special: tuple[str, ...] = ()
    """Special tokens, which a detokenizer skips."""
    added: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    """Added tokens that are text."""
    parsers: ParserNames = ParserNames()  # noqa: RUF009 - frozen

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = byte_level_tokenizer()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in self.special])
        tokenizer.add_tokens([AddedToken(text, special=False) for text in self.added])
        return tokenizer

    def served(self) -> ServedModel:
        tokenizer = self.tokenizer
        card = model_card(vocab_size=tokenizer.get_vocab_size(), max_context_tokens=10_000)
        return served_model(card, template=self.template, tokenizer=tokenizer, parsers=self.parsers)

    def app(self, backend: FakeBackend) -> App:
        keeper = ModelKeeper(backend)  # type: ignore[arg-type]
        keeper.current = self.served()
        keeper.settled.set()
        return make_app(backend, keeper=keeper)

    def says(self, text: str, *, batch_size: int = 1, finish: Finish = Finish.STOP) -> Script:
        """Like `harness.says`, in this model's tokens."""
        tokenizer = self.tokenizer

        def script(request: GenerationRequest) -> list[TokenBatch]:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            ended = finish
            if finish is Finish.STOP:
                ids.append(tokenizer.token_to_id("<|end|>"))
            if len(ids) > request.max_tokens:
                ids, ended = ids[: request.max_tokens], Finish.LENGTH
            batches = [TokenBatch(ids[start : start + batch_size]) for start in range(0, len(ids), batch_size)]
            batches[-1].finish = ended
            return batches

        return script

    def prompt(self, backend: FakeBackend) -> str:
        """Return the prompt that the backend received last."""
        token_ids: Any = backend.last.token_ids
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)


MODELS = {
    "hermes": Model(),
    "hermes, text marks": Model(added=()),
    "hermes, special marks": Model(added=(), special=("<tool_call>", "</tool_call>")),
    "llama3_json": Model(LLAMA3, special=("<|python_tag|>",), added=()),
    "mistral": Model(MISTRAL, special=("[TOOL_CALLS]",), added=()),
    "mistral, names first": Model(MISTRAL, special=("[TOOL_CALLS]", "[ARGS]"), added=()),
    "pythonic": Model(PYTHONIC, added=()),
}
