"""Chat templates like those of common model families, compared with transformers' rendering."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from penstock.frontend.schemas.chat import (
    ChatBody,
    ChatMessage,
    ChatTool,
    FunctionDefinition,
)
from penstock.frontend.text.chat_template import (
    ChatTemplate,
    TemplateRefusedError,
    read_chat_template,
    special_tokens_of,
)
from penstock.frontend.text.tokenizer import ModelTokenizer
from tests.frontend.harness import TOKENIZER, byte_level_tokenizer

TEMPLATES = {
    "header ids": """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (message.content | tojson) + "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "inst, alternating": """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not message.role in ("user", "assistant") %}{% continue %}{% endif %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant/user/…") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "im_start, tools and thinking": """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "first system by default, generation tag": """\
{% for message in messages %}
  {% if loop.first and messages[0]['role'] != 'system' %}
<|im_start|>system
You are a helpful AI assistant.<|im_end|>
  {% endif %}
  {% if message['role'] == 'assistant' %}
<|im_start|>assistant
    {% generation %}
{{ message['content'] }}<|im_end|>
    {% endgeneration %}
  {% else %}
{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
""",
    "role marks, macro and break": """\
{% macro mark(role) %}<|{{ role }}|>{% endmacro %}
{% for message in messages %}
{% if message['role'] not in ['system', 'user', 'assistant'] %}{% break %}{% endif %}
{{ mark(message['role']) + '
' + message['content'] + '<|end|>
' }}{% endfor %}{% if add_generation_prompt %}{{ mark('assistant') + '
' }}{% else %}{{ eos_token }}{% endif %}""",
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": 'Hello, <b>world</b> & "co"'}],
    "system": [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": "été 猫\n\n"}],
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb  "},
        {"role": "user", "content": "{{ c }} {% d %}"},
    ],
    "wrong order": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "a tool": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "<1>é", "tool_call_id": "x"},
    ],
    "assistant first": [{"role": "assistant", "content": "a"}],
}


SPECIAL_TOKENS = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "unk_token": "<unk>"}


def oracle_of(template: str) -> PreTrainedTokenizerFast:
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), **SPECIAL_TOKENS)
    oracle.chat_template = TEMPLATES[template]
    return oracle


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_template_renders_as_in_transformers(template: str, conversation: str) -> None:
    oracle = oracle_of(template)
    messages = CONVERSATIONS[conversation]
    ours = ChatTemplate(TEMPLATES[template], SPECIAL_TOKENS)
    try:
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError:
        with pytest.raises(TemplateRefusedError):
            ours.render(ChatBody(messages=msgspec.convert(messages, list[ChatMessage])))
    else:
        assert ours.render(ChatBody(messages=msgspec.convert(messages, list[ChatMessage]))) == expected


@pytest.mark.parametrize("template", TEMPLATES)
def test_white_space_at_the_end_of_a_continued_message_is_kept(template: str) -> None:
    """As in transformers, but also where the template trims messages."""
    ours = ChatTemplate(TEMPLATES[template], SPECIAL_TOKENS)
    for content in ("class A:\n    ", "```json\n", "The ", " a", "b\n\n", "c"):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
        expected = oracle_of(template).apply_chat_template(messages, tokenize=False, continue_final_message=True)
        body = ChatBody(messages=msgspec.convert(messages, list[ChatMessage]), continue_final_message=True)
        assert ours.render(body) == expected.rstrip() + content[len(content.rstrip()) :]


def test_missing_content_is_the_empty_text() -> None:
    source = "{% for message in messages %}{{ message.role + ':' + message.content + '.' }}{% endfor %}"
    thought = ChatMessage("assistant", None, reasoning_content="hm")
    assert (
        render(source, ChatMessage("user", "x"), ChatMessage("assistant"), thought) == "user:x.assistant:.assistant:."
    )


def render(source: str, *messages: ChatMessage) -> str:
    return ChatTemplate(source, {}).render(ChatBody(messages=list(messages) or [ChatMessage("user", "hi")]))


@pytest.mark.parametrize("content", ["Once upon", "a ", "<", "im_end", "e", "{", "", " \n", "<|im_end|>", "été 猫"])
def test_final_message_is_continued_whatever_the_template_writes_after_it(content: str) -> None:
    source = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{# e #}the end {"
    )
    messages = [ChatMessage("user", "hi"), ChatMessage("assistant", content)]
    body = ChatBody(messages=messages, continue_final_message=True)
    text = ChatTemplate(source, {}).render(body)
    assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{content}"


def test_final_message_that_the_template_omits_cannot_be_continued() -> None:
    body = ChatBody(messages=[ChatMessage("assistant", "e")], continue_final_message=True)
    with pytest.raises(TemplateRefusedError, match="final message"):
        ChatTemplate("the end", {}).render(body)


def test_sandbox_blocks_unsafe_access() -> None:
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ('%s' | attr('format'))(1) | attr('__class__') | attr('__mro__') }}",
    ):
        try:
            text = render(source)
        except TemplateRefusedError:
            continue
        assert "<class" not in text
        assert "globals" not in text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ undefined_function() }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 'x' * (10 ** 400) }}",
        "{% include 'other' %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_template_that_fails_on_the_messages_refuses_them(source: str) -> None:
    with pytest.raises(TemplateRefusedError):
        render(source)


def test_message_of_raise_exception_is_passed_on() -> None:
    with pytest.raises(TemplateRefusedError, match=r"^line 2: only one message$"):
        render("\n{{ raise_exception('only one message') }}")
    with pytest.raises(TemplateRefusedError, match=r"line 2: it cannot .* \(UndefinedError: 'nothing' is undefined\)"):
        render("\n{{ nothing + 'x' }}")


def test_template_with_a_syntax_error_is_refused_at_load() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("{% if x %}\n{% endfor %}", {})


def test_reasoning_is_another_name_of_reasoning_content() -> None:
    message = msgspec.convert({"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, ChatMessage)
    assert render("{{ messages[0].reasoning_content }}", message) == "Hm."


def test_strftime_now_gives_todays_date() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now(tz=datetime.UTC).astimezone().year)


def test_message_has_only_the_keys_that_were_sent() -> None:
    source = "{% for message in messages %}{{ message.keys() | sort | join(' ') }}|{% endfor %}"
    assert render(source, ChatMessage("user", "x"), ChatMessage("assistant")) == "content role|content role|"


@pytest.mark.parametrize("place", ["jinja", "json", "config", "named", "none"])
def test_template_is_found_in_every_place(tmp_path: Path, place: str) -> None:
    config: dict[str, Any] = {}
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text("T", encoding="utf-8")
        config["chat_template"] = "another"
    elif place == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "T"}))
    elif place == "config":
        config["chat_template"] = "T"
    elif place == "named":
        config["chat_template"] = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]
    assert read_chat_template(tmp_path, config) == (None if place == "none" else "T")


@pytest.mark.parametrize("place", ["directory", "config", "json"])
def test_chats_with_tools_use_their_own_template(tmp_path: Path, place: str) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    named = {
        "chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "<tool_call>"}]
    }
    if place == "directory":
        (tmp_path / "chat_template.jinja").write_text("plain", encoding="utf-8")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call>", encoding="utf-8")
    else:
        name = "tokenizer_config.json" if place == "config" else "chat_template.json"
        (tmp_path / name).write_text(json.dumps(named))
    template = ModelTokenizer.load(tmp_path).chat_template
    assert template is not None
    messages = [ChatMessage("user", "x")]
    tools = [ChatTool(FunctionDefinition("f"))]
    assert template.render(ChatBody(messages=messages)) == "plain"
    assert template.render(ChatBody(messages=messages, tools=tools)) == "<tool_call>"
    assert template.render(ChatBody(messages=messages, tools=tools, tool_choice="none")) == "plain"
    assert (template.source, template.tool_source) == ("plain", "<tool_call>")


def test_special_tokens_are_read_from_strings_or_objects() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None, "model_max": 5}
    assert special_tokens_of(config) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_tokenizer_is_loaded_with_template_and_special_tokens(tmp_path: Path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "chat_template": "{{bos_token}}"})
    )
    loaded = ModelTokenizer.load(tmp_path)
    assert loaded.chat_template is not None
    assert loaded.chat_template.render(ChatBody(messages=[ChatMessage("user", "x")])) == "<|im_start|>"
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == TOKENIZER.get_vocab_size()


def test_checkpoint_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        ModelTokenizer.load(tmp_path)
