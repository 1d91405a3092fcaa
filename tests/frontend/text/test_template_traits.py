"""What a chat template makes of roles, parts, calls and empty messages, and how messages are written for it."""

from __future__ import annotations

import pytest

from penstock.frontend.schemas.chat import ChatBody, ChatMessage, ContentPart, FunctionCall, MessageToolCall
from penstock.frontend.text.chat_template import ChatTemplate, TemplateRefusedError


def render(source: str, *messages: ChatMessage) -> str:
    return ChatTemplate(source, {}).render(ChatBody(messages=list(messages)))


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{{ m.role }}: {{ m.content }}", "system"),
        ("{{ m.role }}: {{ m.content }}{# developer #}", "developer"),
        ("{% if m.role in ('system', 'user') %}{{ m.role }}: {{ m.content }}{% endif %}{# developer #}", "system"),
        (
            "{% if m.role == 'developer' %}{{ raise_exception('developer') }}{% endif %}{{ m.role }}: {{ m.content }}",
            "system",
        ),
    ],
)
def test_developer_message_is_shown(source: str, role: str) -> None:
    template = f"{{% for m in messages %}}{source}{{% endfor %}}"
    assert render(template, ChatMessage("developer", "be brief")) == f"{role}: be brief"


@pytest.mark.parametrize("refusal", ["", "{{ raise_exception('no system') }}"])
def test_user_says_what_a_template_without_that_role_would_not_show(refusal: str) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}" + refusal + "{% else %}"
        "{{ m.role }}: {{ m.content if m.content is string else m.content | map(attribute='text') | join }}\n"
        "{% endif %}{% endfor %}"
    )
    system, developer, question = ChatMessage("system", "A"), ChatMessage("developer", "B"), ChatMessage("user", "C")
    assert render(source, system, developer, question) == "user: A\n\nB\n\nC\n"
    assert render(source, system, ChatMessage("assistant", "D")) == "user: A\nassistant: D\n"
    parts = ChatMessage("user", [ContentPart("text", "C"), ContentPart("text", "D")])
    assert render(source, question, developer, parts) == "user: C\nuser: B\n\nCD\n"


def test_parts_reach_a_template_that_reads_them() -> None:
    parts = ChatMessage("user", [ContentPart("text", "one"), ContentPart("text", "two")])
    reading = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert render(reading, parts) == "[one][two]"
    for source in (
        "{{ messages[0].content }}",
        "{{ '>' + messages[0].content }}",
        "{{ messages[0].content | tojson }}",
    ):
        assert "one\ntwo" in render(source, parts).replace("\\n", "\n")


def test_calls_are_split_for_a_template_that_takes_one_at_a_time() -> None:
    calls = [MessageToolCall(f"c{n}", FunctionCall("f", f'{{"n": {n}}}')) for n in (1, 2)]
    results = [ChatMessage("tool", f"result {n}", tool_call_id=f"c{n}") for n in (2, 1)]
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}"
        "{% endif %}{{ m.content }}<{{ m.tool_calls[0].function.arguments | tojson }}>{% else %}{{ m.content }};"
        "{% endif %}{% endfor %}"
    )
    rendered = render(
        source, ChatMessage("assistant", "I look.", tool_calls=calls), *results, ChatMessage("user", "So?")
    )
    assert rendered == '<{"n": 2}>result 2;I look.<{"n": 1}>result 1;So?;'


def test_empty_answer_reaches_a_template_that_refuses_the_empty_text() -> None:
    source = (
        "{% for m in messages %}{% if m.content == '' %}{{ raise_exception('empty') }}{% endif %}"
        "{{ m.content if m.content is string else m.content[0].text }}.{% endfor %}"
    )
    assert render(source, ChatMessage("user", "x"), ChatMessage("assistant", None)) == "x.."
    with pytest.raises(TemplateRefusedError, match="empty"):
        render(source.replace("== ''", "in ('', [{'type': 'text', 'text': ''}])"), ChatMessage("assistant", ""))


def test_texts_are_parts_for_a_template_that_shows_parts_only() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text if part.type == 'text' }}"
        "{{ '<image>' if part.type == 'image' }}{% endfor %}|{% endfor %}"
    )
    system, question = ChatMessage("system", "A"), ChatMessage("user", "B")
    picture = ChatMessage("user", [ContentPart("image_url", image_url="data:,"), ContentPart("text", "C")])
    assert render(source, system, question, picture) == "system: A|user: B|user: <image>C|"
    begun = ChatBody(messages=[question, ChatMessage("assistant", "Well, ")], continue_final_message=True)
    assert ChatTemplate(source, {}).render(begun) == "user: B|assistant: Well, "
