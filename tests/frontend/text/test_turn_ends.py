"""The tokens that end turns, found by rendering. The templates have the forms of those of common models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tokenizers import AddedToken

from penstock.frontend.schemas.chat import ChatBody, ChatMessage
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.frontend.text.turn_ends import find_turn_ends
from penstock.process.native_libraries import GuardedTokenizer
from tests.frontend.harness import byte_level_tokenizer, save_model_files

if TYPE_CHECKING:
    from pathlib import Path

LOOP = "{{% for m in messages %}}{}{{% endfor %}}"
CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.arguments.key }}</key></call>{% endfor %}"
HARMONY = """\
{% if m.reasoning_content %}<start>analysis<message>{{ m.reasoning_content }}<end>{% endif %}\
{% if m.tool_calls %}<start>call<message>{{ m.tool_calls[0].function.arguments | tojson }}<call>\
{% elif m.content %}<start>{{ m.role }}<message>{{ m.content }}\
{% if m.role == 'assistant' and loop.last %}<return>{% else %}<end>{% endif %}{% endif %}"""

TEMPLATES = {
    "ChatML": (LOOP.format("<start>{{ m.role }}\n{{ m.content }}" + CALLS + "<end>\n"), ["<end>"]),
    "Phi: the end of the text last": (
        LOOP.format("<start>{{ m.content }}<end>\n") + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        ["<end>"],
    ),
    "gpt-oss: answer and call end with tokens of their own": (LOOP.format(HARMONY), ["<return>", "<call>"]),
    "GLM: the next role is the end": (
        LOOP.format(
            "{% if m.role == 'tool' %}<return>{% elif m.role == 'user' %}<start>{% endif %}{{ m.content }}" + CALLS
        ),
        ["<start>", "<return>"],
    ),
    "Command R7B: text and calls have marks, and the next turn is begun": (
        LOOP.format("{% if m.content %}<message>{{ m.content }}<return>{% endif %}" + CALLS + "<end>") + "<start>",
        ["<end>"],
    ),
    "a closing token only before another turn": (
        LOOP.format("{{ m.role }}: {{ m.content }}{% if not loop.last %}<end>{% endif %}"),
        ["<end>"],
    ),
    "an end that is added, not special": (LOOP.format("{{ m.content }}\n</turn>\n"), ["</turn>"]),
    "roles as text": (LOOP.format("### {{ m.role }}: {{ m.content }}\n"), []),
    "contents are not shown": ("<start>", []),
    "every message is refused": ("{{ raise_exception('no') }}", []),
    "a bad filter": (LOOP.format("{{ m.content + 1 }}"), []),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_turn_ends_as_the_template_shows(name: str) -> None:
    source, ends = TEMPLATES[name]
    tokenizer = byte_level_tokenizer()
    special = ("<start>", "<message>", "<call>", "<return>", "<end>", "<eos>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text) for text in ("</turn>", "</call>", "</key>")])
    model = ModelTokenizer(GuardedTokenizer(tokenizer), ChatTemplate(source, {"eos_token": "<eos>"}))
    assert find_turn_ends(model) == tuple(tokenizer.token_to_id(end) for end in ends)


def test_model_without_a_template_shows_no_end() -> None:
    assert find_turn_ends(ModelTokenizer(GuardedTokenizer(byte_level_tokenizer()), None)) == ()


@pytest.mark.parametrize(
    ("config", "begin"), [({}, "<|begin|>"), ({"bos_token": None}, ""), ({"bos_token": "<s>"}, "<s>")]
)
def test_special_tokens_map_names_tokens_that_the_config_does_not(
    config: dict[str, str | None], begin: str, tmp_path: Path
) -> None:
    save_model_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ messages[0].content }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|begin|>"}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = ModelTokenizer.load(tmp_path)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render(ChatBody(messages=[ChatMessage("user", "hi")])) == f"{begin}|hi"
