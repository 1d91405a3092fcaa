"""Values and names by which clients of other servers ask for what we have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.frontend.generation.submission.sampling import is_deterministic, read_sampling
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.decoding import AnsweredBody, decode_chat, decode_completion
from penstock.frontend.schemas.unknown_fields import find_unknown_fields
from tests.frontend.harness import model_card

BODIES = pytest.mark.parametrize(
    ("decode", "prompt"),
    [(decode_completion, {"prompt": "x"}), (decode_chat, {"messages": [{"role": "user", "content": "x"}]})],
)


@BODIES
def test_seed_of_minus_one_is_drawn_anew_for_each_request(
    decode: Callable[[bytes], AnsweredBody], prompt: dict[str, Any]
) -> None:
    body = decode(msgspec.json.encode(prompt | {"seed": -1, "temperature": 1}))
    assert len({read_sampling(body, model_card(), ()).seed for _ in range(3)}) == 3
    assert not is_deterministic(body, model_card())


@BODIES
def test_limit_of_minus_one_token_is_none(decode: Callable[[bytes], AnsweredBody], prompt: dict[str, Any]) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        assert decode(msgspec.json.encode(prompt | {field: -1})).requested_max_tokens == ("max_tokens", None)


@BODIES
def test_repeat_penalty_is_another_name_that_the_usual_one_overrides(
    decode: Callable[[bytes], AnsweredBody], prompt: dict[str, Any]
) -> None:
    for fields, expected in (({}, 1.2), ({"repetition_penalty": 1.1}, 1.1)):
        body = decode(msgspec.json.encode(prompt | {"repeat_penalty": 1.2} | fields))
        assert (body.repetition_penalty, body.repeat_penalty) == (expected, None)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("n_predict", "max_tokens"), ("no_stop_trim", "include_stop_str_in_output"), ("extra", None)]
)
async def test_field_of_another_server_is_answered_by_ours(theirs: str, ours: str | None) -> None:
    (unknown,) = await find_unknown_fields(msgspec.json.encode({"messages": [], theirs: 1}), ChatBody)
    assert (unknown.name, unknown.nearest) == (theirs, ours)
