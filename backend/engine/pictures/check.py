"""Compares the pictures of a request with its prompt and with what the model takes."""

from __future__ import annotations

import math
from array import array

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass.extensions import PictureTower
from penstock.shm.link.events import Submission
from penstock.shm.messages import AskQuote, Picture, PromptHeader, TextHeader, picture_token_ids


class BadPicture(ValueError):
    """One line that names the picture, the value and the limit."""


def words_of(submission: Submission[PromptHeader], tower: PictureTower | None) -> NDArray[np.int32]:
    """The tokens of a request with 0 in place of its pictures' tokens. Raises BadPicture."""
    tokens = np.frombuffer(submission.tokens, np.int32)
    message = submission.message
    if not isinstance(message, TextHeader) or not message.pictures:
        return tokens
    if tower is None:
        raise BadPicture("the model takes no pictures")
    if message.num_prompt_logprobs >= 0:
        raise BadPicture("log probabilities of a prompt with pictures")
    tokens, free = tokens.copy(), 0
    for index, picture in enumerate(message.pictures):
        try:
            _check(picture, tower, needs_pixels=not isinstance(message, AskQuote))
            free = _blank(tokens[: message.num_prompt_tokens], picture, free)
        except ValueError as error:
            raise BadPicture(f"pictures[{index}]: {error}"[:512]) from None
    return tokens


def _check(picture: Picture, tower: PictureTower, *, needs_pixels: bool) -> None:
    num_bytes = math.prod(picture.shape)
    if num_bytes > tower.max_picture_bytes:
        raise ValueError(f"{num_bytes} bytes of pixels; the limit is {tower.max_picture_bytes}")
    if needs_pixels and (picture.pixels is None or picture.pixels.num_bytes != num_bytes):
        held = 0 if picture.pixels is None else picture.pixels.num_bytes
        raise ValueError(f"{held} bytes of pixels; its shape {list(picture.shape)} has {num_bytes}")
    expected = tower.num_tokens(picture.shape, picture.grid)
    if picture.num_tokens != expected:
        raise ValueError(f"{picture.num_tokens} tokens; the model makes {expected} of pixels {list(picture.shape)}")


def _blank(prompt: NDArray[np.int32], picture: Picture, free: int) -> int:
    """Write 0 over the picture's tokens. free is the first token behind the pictures before; return it for the next."""
    ids: array[int] = picture_token_ids(picture.digest, picture.num_tokens)
    offset = 0
    for first, count in picture.spans:
        if first < free or first + count > len(prompt):
            raise ValueError(f"its span of {count} tokens from {first} on is not between {free} and {len(prompt)}")
        if prompt[first : first + count].tobytes() != ids[offset : offset + count].tobytes():
            raise ValueError(f"the {count} tokens from {first} on are not those of its digest")
        prompt[first : first + count] = 0
        free, offset = first + count, offset + count
    return free
