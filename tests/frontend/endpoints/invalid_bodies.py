"""Bodies that the server must refuse, by what is wrong with them."""

from __future__ import annotations

import re
from typing import Any

from penstock.frontend.schemas.generation import MAX_CHOICES
from tests.frontend.harness import VOCAB_SIZE

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
HUGE = 10**400
DEEP = b"[" * 100_000 + b"]" * 100_000

FORBIDDEN_IN_ERRORS = re.compile(r"0x[0-9a-f]{6}|/dev/shm|ipc://|Traceback|File \"|msgspec|jinja2\.|object at ")
"""Internals that no error message may show."""

NOT_JSON: list[bytes] = [
    b"",
    b" ",
    b"{",
    b"}",
    b"x",
    b"{]",
    b'{"messages":',
    b'{"messages":[}',
    b'{"prompt":"x",}',
    b"{'prompt':'x'}",
    b'{"prompt":"x"} {"prompt":"x"}',
    b'{"prompt":"x"}\x00',
    b'\xef\xbb\xbf{"prompt":"x"}',
    b'\xff\xfe{\x00"\x00',
    b'{"prompt":"\xff"}',
    b'{"prompt":"\xc3"}',
    b'{"prompt":"\xed\xa0\x80"}',
    b'{"prompt":"\\ud800"}',
    b'{"prompt":"\\udc00\\ud800"}',
    b'{"prompt":"\\x41"}',
    b'{"prompt":"a\nb"}',
    b'{"prompt":"x","temperature":NaN}',
    b'{"prompt":"x","temperature":Infinity}',
    b'{"prompt":"x","temperature":-Infinity}',
    b'{"prompt":"x","temperature":.5}',
    b'{"prompt":"x","temperature":1.}',
    b'{"prompt":"x","n":01}',
    b'{"prompt":"x","n":+1}',
    b'{"prompt":"x","n":0x1}',
    b'{"prompt":"x","echo":tru}',
    b'{"prompt":"x","unknown":' + DEEP + b"}",
    b'{"prompt":' + DEEP + b"}",
    b'{"messages":' + DEEP + b"}",
    b'{"prompt":"x","logit_bias":' + b'{"1":' * 50_000 + b"0" + b"}" * 50_000 + b"}",
    DEEP,
]

NOT_AN_OBJECT: list[Any] = [None, [], [1], "x", 1, 1.5, True]

# (field, value): refused with 400 and the field as param, on both endpoints
WRONG_FIELDS: list[tuple[str, Any]] = [
    *(("model", value) for value in (1, True, [], {}, "x" * 513)),
    *(("stream", value) for value in (1, 0, "true", [], {})),
    *(("n", value) for value in (0, -1, 17, 10**9, HUGE, 1.5, 1.0, "1", True, [1])),
    *(("max_tokens", value) for value in (0, -1, 2**24 + 1, 2**63, HUGE, -HUGE, 1.5, "5", True)),
    *(("temperature", value) for value in (-0.01, 2.01, 1e308, HUGE, "1", True, [], {})),
    *(("top_p", value) for value in (0, -0.1, 1.01, HUGE, "1", False)),
    *(("top_k", value) for value in (-2, 2**31, HUGE, 1.5, "1", True)),
    *(("min_p", value) for value in (-0.1, 1.1, "0")),
    *(("repetition_penalty", value) for value in (0, -1, 1e-38, 0.009, 101, "1")),
    *(("presence_penalty", value) for value in (-2.1, 2.1, "0")),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, [])),
    *(("seed", value) for value in (2**63, -(2**63) - 1, HUGE, 0.5, "1", True)),
    *(("stop", value) for value in ("", ["a"] * 17, ["x"] * 60_000, "x" * 257, 1, {}, True)),
    ("stop_token_ids", list(range(33))),
    ("stop_token_ids", 1),
    ("stop_token_ids", "1"),
    ("ignore_eos", 1),
    ("stream_options", {"include_usage": True}),
    ("stream_options", 1),
    ("stream_options", []),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1.5": 1}),
    ("logit_bias", {str(2**31): 1}),
    ("logit_bias", {str(HUGE): 1}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {str(token): 0 for token in range(301)}),
    ("logit_bias", [1]),
    ("logit_bias", 5),
    *(("typical_p", value) for value in (0, -0.1, 1.01, HUGE, "1", True)),
    *(("min_tokens", value) for value in (-1, 2**24 + 1, HUGE, 1.5, "1", True, 1000)),
    *(("allowed_token_ids", value) for value in ([], [VOCAB_SIZE], list(range(4097)), 5, "5", {})),
    *(("bad_words", value) for value in ("x", 5, ["x"] * 65, {}, [f"{n} words" for n in range(40)])),
    *(("priority", value) for value in (-1001, 1001, HUGE, 0.5, "0", True)),
    *(("timeout_ms", value) for value in (0, -1, 86_400_001, HUGE, 0.5, "1")),
    *(("truncate_prompt_tokens", value) for value in (0, -2, 2**24 + 1, 1.5, "1", True)),
    *(("truncation_side", value) for value in ("middle", "", 1)),
    *(("prompt_logprobs", value) for value in (-1, 21, HUGE, 1.5, "1", True)),
    *(("user", value) for value in (1, "x" * 513, ["x"])),
    *(("safety_identifier", value) for value in (1, "x" * 513)),
    *(("prompt_cache_key", value) for value in (1, "x" * 513)),
    *(("service_tier", value) for value in (1, "x" * 65)),
    *(("metadata", value) for value in (1, [], {"x" * 65: "y"}, {str(n): "" for n in range(17)})),
    *(("response_format", value) for value in (1, "json_object", [])),
    *(("structured_outputs", value) for value in (1, "x", [])),
    *(("guided_choice", value) for value in ([], "x", {}, ["x"] * 1025)),
    *(("guided_regex", value) for value in (1, [], "", "x" * 40_000)),
    *(("guided_grammar", value) for value in (1, {}, "", "x" * 40_000)),
    *(("guided_json", value) for value in (1, [], "", "x", "[1]", "[" * 100_000, '{"a":' * 90 + "1" + "}" * 90)),
    *(
        (field, value)
        for field in (
            "store",
            "return_token_ids",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "add_special_tokens",
            "include_stop_str_in_output",
            "ignore_eos",
        )
        for value in (1, "true", [])
    ),
]

# (field, value, param): the invalid value is inside the field
WRONG_INSIDE: list[tuple[str, Any, str]] = [
    ("stop", [""], "stop[0]"),
    ("stop", ["a", 1], "stop[1]"),
    ("stop", ["a", "b" * 257], "stop[1]"),
    ("stop", [None], "stop[0]"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stop_token_ids", [2**31], "stop_token_ids[0]"),
    ("stop_token_ids", [1, "1"], "stop_token_ids[1]"),
    ("logit_bias", {"1": 101}, "logit_bias[...]"),
    ("logit_bias", {"1": -100.5}, "logit_bias[...]"),
    ("logit_bias", {"1": "1"}, "logit_bias[...]"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ("stream_options", {"continuous_usage_stats": "x"}, "stream_options.continuous_usage_stats"),
    ("allowed_token_ids", [1, -1], "allowed_token_ids[1]"),
    ("allowed_token_ids", [True], "allowed_token_ids[0]"),
    ("bad_words", ["a", ""], "bad_words[1]"),
    ("bad_words", ["a", "b" * 257], "bad_words[1]"),
    ("bad_words", ["a", "b c d e f g h i j k"], "bad_words[1]"),
    ("metadata", {"a": 1}, "metadata[...]"),
    ("metadata", {"a": "x" * 513}, "metadata[...]"),
    ("response_format", {}, "response_format.type"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema.schema"),
    ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": 5}},
        "response_format.json_schema.schema",
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x" * 513, "schema": {}}},
        "response_format.json_schema.name",
    ),
    ("structured_outputs", {"choice": []}, "structured_outputs.choice"),
    ("structured_outputs", {"choice": ["a", ""]}, "structured_outputs.choice[1]"),
    ("structured_outputs", {"regex": 5}, "structured_outputs.regex"),
    ("structured_outputs", {"json": "not one"}, "structured_outputs.json"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs.choice"),
    ("structured_outputs", {"grammar": "x" * 40_000}, "structured_outputs.grammar"),
    ("structured_outputs", {"json_object": 1}, "structured_outputs.json_object"),
]

UNSUPPORTED: list[tuple[str, Any]] = [
    ("suffix", "x"),
    ("use_beam_search", True),
    ("grammar", "root ::= x"),
    ("json_schema", {"type": "nonsense"}),
    ("prompt_embeds", "AAAA"),
    ("mirostat", 2),
    ("dry_multiplier", 0.8),
    ("xtc_probability", 0.5),
    ("top_n_sigma", 1),
    ("dynatemp_range", 0.5),
    ("logprob_token_ids", [1]),
    ("repetition_detection", {"x": 1}),
    ("return_tokens_as_token_ids", True),
    ("guided_whitespace_pattern", " "),
]

UNSUPPORTED_IN_CHAT: list[tuple[str, Any]] = [
    ("best_of", 2),
    ("echo", True),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("chat_template", "{{ ''.__class__.__mro__ }}"),
    ("chat_template", "{% for i in range(10**9) %}x{% endfor %}"),
    ("modalities", ["audio"]),
    ("audio", {"voice": "x"}),
    ("web_search_options", {"x": 1}),
]

# (messages, param)
WRONG_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ({}, "messages"),
    ("hi", "messages"),
    (1, "messages"),
    (MESSAGES * 2049, "messages"),
    ([1], "messages[0]"),
    ([None], "messages[0]"),
    ([[]], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"content": "hi"}], "messages[0].role"),
    ([{"role": "robot", "content": "hi"}], "messages[0].role"),
    ([{"role": "", "content": "hi"}], "messages[0].role"),
    ([{"role": 1, "content": "hi"}], "messages[0].role"),
    ([{"role": "User", "content": "hi"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "system", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 1}], "messages[0].content"),
    ([{"role": "user", "content": {}}], "messages[0].content"),
    ([*MESSAGES, {"role": "user", "content": True}], "messages[1].content"),
    ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
     "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "file", "file": {}}]}],
     "messages[0].content[1].type"),
    ([{"role": "user", "content": [{"type": "text", "text": ""}] * 2049}], "messages[0].content"),
    ([{"role": "user", "content": "hi", "name": 5}], "messages[0].name"),
    ([{"role": "user", "content": "hi", "name": "x" * 513}], "messages[0].name"),
    ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
]  # fmt: skip

# (prompt, param)
WRONG_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt"),
    (1, "prompt"),
    (True, "prompt"),
    ({}, "prompt"),
    ("", "prompt"),
    ([], "prompt"),
    ([""], "prompt"),
    ([[]], "prompt[0]"),
    ([[1], []], "prompt[1]"),
    (["a", 1], "prompt[1]"),
    ([1, "a"], "prompt[1]"),
    ([[1], 1], "prompt[1]"),
    ([[1], "a"], "prompt[1]"),
    ([None], "prompt[0]"),
    ([1.5], "prompt[0]"),
    ([-1], "prompt[0]"),
    ([True], "prompt[0]"),
    ([2**31], "prompt[0]"),
    ([HUGE], "prompt[0]"),
    ([[1, -1]], "prompt[0][1]"),
    ([[1, "a"]], "prompt[0][1]"),
    ([[[1]]], "prompt[0][0]"),
    ([VOCAB_SIZE], "prompt"),
    ([[1], [VOCAB_SIZE]], "prompt[1]"),
    (["a"] * (MAX_CHOICES + 1), "prompt"),
    (["a"] * 60_000, "prompt"),
]

# (endpoint, fields that are valid only alone, param, part of the message)
WRONG_TOGETHER: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"best_of": 2, "n": 3}, "best_of", "at least n, which is 3, got 2"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of", "stream"),
    (COMPLETIONS, {"best_of": 16, "prompt": ["x"] * 9}, "best_of", "at most 128 choices"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "got 0; 0 is allowed only with echo"),
    (COMPLETIONS, {"max_tokens": 5, "min_tokens": 6}, "min_tokens", "at most 5 tokens"),
    (CHAT, {"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens", "at most 5 tokens"),
    (CHAT, {"continue_final_message": True}, "continue_final_message", "from the assistant"),
    (
        CHAT,
        {"continue_final_message": True, "messages": [*MESSAGES, {"role": "assistant", "tool_calls": []}]},
        "continue_final_message",
        "content",
    ),
    (
        CHAT,
        {
            "continue_final_message": True,
            "add_generation_prompt": True,
            "messages": [*MESSAGES, {"role": "assistant", "content": "so"}],
        },
        "add_generation_prompt",
        "continue_final_message",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "guided_regex",
        "combined with response_format",
    ),
    (
        COMPLETIONS,
        {"guided_choice": ["a"], "structured_outputs": {"json": {}}},
        "structured_outputs.json",
        "combined with guided_choice",
    ),
    (CHAT, {"guided_json": {"a": {}}, "guided_grammar": "start: x"}, "guided_grammar", "combined with guided_json"),
    (CHAT, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    (CHAT, {"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "not supp"),
    (COMPLETIONS, {"timeout_ms": 5, "stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
]
