"""Models that call tools and reason, as a frontend sees them: chat templates like those of real model families, and
tokenizers with their marks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from penstock.frontend.app import App
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.settings import ParserNames
from penstock.shm.client import GenerationRequest, TokenBatch
from penstock.shm.messages import Finish
from tests.frontend.harness import (
    CHAT_TEMPLATE,
    FakeBackend,
    Script,
    byte_level_tokenizer,
    make_app,
    model_card,
    model_keeper,
    served_model,
)

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
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
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
).replace(
    """'<|im_start|>assistant\\n{"name": "' + called.name + '", "parameters": ' }}
        {{- (called.arguments | tojson) + '}<|im_end|>' }}""",
    """'<|im_start|>assistant\\n[' + called.name + '(' }}
        {%- for key, value in called.arguments.items() %}
            {{- ', ' if not loop.first }}{{- key + '=' + (value | tojson) }}
        {%- endfor %}{{- ')]<|im_end|>' }}""",
)

QWEN3_CODER = """\
{%- if tools %}
    {{- '<|im_start|>system\\nYou have access to these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n<function>\\n<name>' + tool.function.name + '</name>' }}
        {%- for key, schema in (tool.function.parameters.properties or {}).items() %}
            {{- '\\n<parameter>\\n<name>' + key + '</name>\\n<type>' + (schema.type | string) + '</type>' }}
            {{- '\\n</parameter>' }}
        {%- endfor %}
        {{- '\\n</function>' }}
    {%- endfor %}
    {{- '\\n</tools>\\nTo call one, reply with:\\n<tool_call>\\n<function=example_name>' }}
    {{- '\\n<parameter=example_key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {%- set written = value | string if value is string or value is number else value | tojson %}
                {{- '<parameter=' + key + '>\\n' + written + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

GLM4 = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}
Write a call as
<tool_call>{name}
<arg_key>{key}</arg_key>
<arg_value>{value}</arg_value>
</tool_call>{%- endif -%}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson }}{{- '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{%- endif %}
"""

DEEPSEEK_V3 = """\
{%- if tools %}{{- '## Tools\\n' }}{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- elif message.tool_calls %}
        {{- '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{{ '\\n' if not loop.last }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- else %}{{- '<｜' + message.role + '｜>' + message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
"""
"""Like the published template, it concatenates the arguments as a text."""

DEEPSEEK_V31 = DEEPSEEK_V3.replace("call.type + '<｜tool▁sep｜>' + call.function.name", "call.function.name").replace(
    "'\\n```json\\n' + call.function.arguments + '\\n```<", "'<｜tool▁sep｜>' + call.function.arguments + '<"
)

DEEPSEEK_V32 = """\
{%- set mark = '｜DSML｜' %}
{%- if tools %}
    {{- '## Tools\\n<' + mark + 'function_calls>\\n' }}
    {%- for tool in tools %}{{- (tool.function | tojson) + '\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<｜' + message.role + '｜>' + message.content }}
    {%- if message.tool_calls %}{{- '\\n\\n<' + mark + 'function_calls>\\n' }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<' + mark + 'invoke name="' + call.function.name + '">\\n' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '<' + mark + 'parameter name="' + key + '" string="' + ('true' if value is string else 'false') }}
            {{- '">' + (value if value is string else value | tojson) + '</' + mark + 'parameter>\\n' }}
        {%- endfor %}
        {{- '</' + mark + 'invoke>\\n' + ('</' + mark + 'function_calls>' if loop.last else '') }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
"""

KIMI_K2 = """\
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_' + message.role + '|><|im_middle|>' }}
    {%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\\n' }}{%- endif %}
    {{- message.content }}
    {%- if message.tool_calls %}
        {{- '<|tool_calls_section_begin|>' }}
        {%- for call in message.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- (call.function.arguments | tojson) + '<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_section_end|>' }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""

GRANITE = """\
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' + (tools | tojson) }}
    {{- 'Respond with <|tool_call|> and a JSON list of calls.<|end_of_text|>\\n' }}
{%- endif %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
"""
HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- set last = namespace(name='') %}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
    {%- for tool in tools %}{{- 'type ' + tool.function.name + ' = ' + (tool | tojson) + ';\\n' }}{%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- (message.content | tojson) + '<|end|>' }}
    {%- elif message.tool_calls %}
        {%- if message.content and message.thinking %}{{- raise_exception('either content or thinking') }}{%- endif %}
        {%- if message.thinking or message.content %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (message.thinking or message.content) + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- set last.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- (call.arguments | tojson) + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

GEMMA = """\
{%- macro written(value) %}
    {%- if value is string %}{{- '<escape>' + value + '<escape>' }}
    {%- elif value is mapping %}
        {{- '{' }}
        {%- for key, inner in value.items() %}{{- ',' if not loop.first }}{{- key + ':' + written(inner) }}{%- endfor %}
        {{- '}' }}
    {%- elif value is iterable %}
        {{- '[' }}{%- for inner in value %}{{- ',' if not loop.first }}{{- written(inner) }}{%- endfor %}{{- ']' }}
    {%- else %}{{- value | tojson }}{%- endif %}
{%- endmacro %}
{%- for tool in tools or [] %}
    {{- '<start_function_declaration>declaration:' + tool.function.name + written(tool.function.parameters) }}
    {{- '<end_function_declaration>' }}
{%- endfor %}
{%- for message in messages %}
    {{- '<start_of_turn>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<start_function_call>call:' + call.function.name + written(call.function.arguments) }}
        {{- '<end_function_call>' }}
    {%- endfor %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

GEMMA_MARKS = ("<start_function_call>", "<end_function_call>", "<escape>")
HARMONY_MARKS = tuple(f"<|{mark}|>" for mark in ("start", "end", "message", "channel", "constrain", "return", "call"))
DEEPSEEK_MARKS = tuple(f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
KIMI_K2_MARKS = tuple(
    f"<|tool_call{mark}|>" for mark in ("s_section_begin", "s_section_end", "_begin", "_end", "_argument_begin")
)
GLM4_MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@dataclass(frozen=True)
class Model:
    """A served model and its tokenizer."""

    template: str = HERMES
    special: tuple[str, ...] = ()
    """Special tokens, which a detokenizer skips."""
    added: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    """Added tokens that are text."""
    parsers: ParserNames = ParserNames()  # noqa: RUF009 - frozen
    end: str = "<|end|>"
    """The special token that ends an answer."""

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = byte_level_tokenizer()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in self.special])
        tokenizer.add_tokens([AddedToken(text, special=False) for text in self.added])
        return tokenizer

    def served(self, backend: FakeBackend | None = None) -> ServedModel:
        tokenizer = self.tokenizer
        ends = (tokenizer.token_to_id(self.end),)
        card = model_card(vocab_size=tokenizer.get_vocab_size(), max_context_tokens=10_000, eos_token_ids=ends)
        return served_model(card, backend, template=self.template, tokenizer=tokenizer, parsers=self.parsers)

    def app(self, backend: FakeBackend) -> App:
        return make_app(backend, keeper=model_keeper(backend, self.served(backend)))

    def says(self, text: str, *, batch_size: int = 1, finish: Finish = Finish.STOP) -> Script:
        """Like `harness.says`, in this model's tokens."""
        tokenizer = self.tokenizer

        def script(request: GenerationRequest) -> list[TokenBatch]:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            ended = finish
            if finish is Finish.STOP:
                ids.append(tokenizer.token_to_id(self.end))
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
    "qwen3_coder": Model(QWEN3_CODER),
    "glm4": Model(GLM4, added=(*GLM4_MARKS, "<think>", "</think>")),
    "glm4, text marks": Model(GLM4, added=()),
    "deepseek": Model(DEEPSEEK_V3, added=DEEPSEEK_MARKS),
    "deepseek, V3.1": Model(DEEPSEEK_V31, special=DEEPSEEK_MARKS, added=()),
    "deepseek_v32": Model(DEEPSEEK_V32, special=("｜DSML｜",), added=()),
    "deepseek_v32, text mark": Model(DEEPSEEK_V32, added=()),
    "kimi_k2": Model(KIMI_K2, special=KIMI_K2_MARKS, added=()),
    "granite": Model(GRANITE, special=("<|tool_call|>",), added=()),
    "gemma": Model(GEMMA, special=GEMMA_MARKS, added=()),
    "generic": Model(CHAT_TEMPLATE, added=()),
    "harmony": Model(HARMONY, special=HARMONY_MARKS, added=(), end="<|return|>"),
}
