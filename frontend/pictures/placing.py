"""Puts a chat's pictures into its prompt: reads them, and replaces what the template writes for each of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.frontend.pictures.families import FAMILIES, family_name
from penstock.frontend.pictures.messages import PictureJob
from penstock.frontend.pictures.workshop import EncodedPicture, PictureWorkshop, ProcessedPicture
from penstock.frontend.schemas.chat import ChatBody, ContentPart, PicturePart
from penstock.frontend.text.pooling_files import read_object
from penstock.frontend.text.spellings import MarkedText
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten
from penstock.shm.messages import MAX_PICTURES, ModelCard, Picture, picture_token_ids

logger = logging.getLogger("penstock.pictures")

_MAX_LARGEST = 16
"""Pictures of the largest size that one request may have."""
_ANY_TYPE = ("", "application/octet-stream", "binary/octet-stream")


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    spans: tuple[tuple[int, int], ...]
    """(first token, number of tokens) in the prompt."""
    processed: ProcessedPicture

    def moved(self, num_tokens: int) -> PlacedPicture:
        """Return the picture behind more tokens."""
        return replace(self, spans=tuple((first + num_tokens, count) for first, count in self.spans))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat's tokens, with the image token at the places of its pictures."""

    token_ids: list[int]
    pictures: tuple[PlacedPicture, ...] = ()


def sent_pictures(
    token_ids: Sequence[int], pictures: Sequence[PlacedPicture]
) -> tuple[Sequence[int], tuple[Picture, ...], tuple[bytes, ...]]:
    """Return a prompt as the backend receives it: tokens with the pictures' own ids, pictures, and their pixels."""
    if not pictures:
        return token_ids, (), ()
    tokens = array("i", token_ids)
    sent = []
    for picture in pictures:
        result = picture.processed.result
        own = picture_token_ids(result.digest, sum(count for _, count in picture.spans))
        done = 0
        for first, count in picture.spans:
            tokens[first : first + count] = own[done : done + count]
            done += count
        sent.append(Picture(picture.spans, result.digest, result.shape, result.grid))
    return tokens, tuple(sent), tuple(picture.processed.pixels for picture in pictures)


def picture_parts(body: ChatBody) -> list[tuple[str, ContentPart]]:
    """Return a chat's pictures, with the body's name of each."""
    return [
        (part.path if isinstance(part, PicturePart) else f"messages[{number}].content[{index}].image_url", part)
        for number, message in enumerate(body.messages)
        if isinstance(message.content, list)
        for index, part in enumerate(message.content)
        if part.is_picture
    ]


class PictureReader:
    """Reads pictures for one model."""

    def __init__(
        self,
        card: ModelCard,
        family: str,
        image_token_id: int,
        workshop: PictureWorkshop,
    ) -> None:
        self._card = card
        self._family_name = family
        self._family = FAMILIES[family]
        self._image_token_id = image_token_id
        self._workshop = workshop

    @classmethod
    def of_model(cls, card: ModelCard, added_tokens: dict[str, int], workshop: PictureWorkshop) -> PictureReader | None:
        """Return the reader of a model; None if it takes no pictures, or if its files do not show how."""
        if not card.takes_pictures:
            return None
        name = family_name(read_object(Path(card.model_dir) / "config.json"))
        family = FAMILIES.get(name)
        if family is None:
            reason = f"no image processor is known for model_type {shorten(name)}"
        elif (image_token_id := added_tokens.get(family.image_token)) is None:
            reason = f"its tokenizer has no token {family.image_token}"
        else:
            return cls(card, name, image_token_id, workshop)
        logger.warning("%s takes no pictures: %s", card.model_id, reason)
        return None

    def check_count(self, text: str, parts: Sequence[tuple[str, ContentPart]]) -> None:
        """Check that the template has written a place for each picture. Raises ApiError."""
        num_places = text.count(self._family.place)
        if num_places < len(parts):
            message = f"the model's chat template shows {num_places} of {len(parts)} pictures"
            raise ApiError(ErrorKind.TEMPLATE_REFUSED, f"messages: {message}", param="messages")
        if num_places > len(parts):
            invalid("messages", f"a text contains {self._family.place}, which stands for a picture; leave it out")

    async def read(self, parts: Sequence[tuple[str, ContentPart]], tenant: bytes) -> list[ProcessedPicture]:
        """Decode and process pictures. Raises ApiError."""
        if len(parts) > MAX_PICTURES:
            invalid("messages", f"{len(parts)} pictures; the limit is {MAX_PICTURES}")
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = [
                    tasks.create_task(self._read(path, part.picture_url, tenant, is_alone=len(parts) == 1))
                    for path, part in parts
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        pictures = [task.result() for task in reading]
        num_bytes, max_bytes = sum(len(each.pixels) for each in pictures), _MAX_LARGEST * self._card.max_picture_bytes
        if num_bytes > max_bytes:
            invalid("messages", f"the pictures have {num_bytes} bytes of pixels; the limit of a request is {max_bytes}")
        return pictures

    async def _read(self, path: str, url: str, tenant: bytes, *, is_alone: bool) -> ProcessedPicture:
        is_sent = url[:5].lower() == "data:"
        with self._workshop.place(path, tenant):
            async with contextlib.nullcontext() if is_sent else self._workshop.fetching(tenant):
                encoded = await self._encoded(path, url, is_sent=is_sent)
                max_bytes = self._card.max_picture_bytes
                job = PictureJob(
                    self._card.model_dir, self._family_name, encoded.media_type, encoded.is_base64, is_alone, max_bytes
                )
                return await self._workshop.process(encoded, job, tenant)

    async def _encoded(self, path: str, url: str, *, is_sent: bool) -> EncodedPicture:
        if is_sent:
            head, comma, text = url[5:].partition(",")
            media_type, *options = head.lower().split(";")
            if not comma or "base64" not in options or not text.isascii():
                invalid(path, "a data URI must be data:TYPE;base64, and base64 behind it")
            data = text.encode()
        else:
            data, media_type = await self._workshop.fetch(path, url)
        kind = media_type.partition(";")[0].strip().lower()
        return EncodedPicture(path, data, is_sent, "" if kind in _ANY_TYPE else kind)

    def expand(self, prompt: MarkedText, pictures: Sequence[ProcessedPicture]) -> MarkedText:
        """Return the prompt's text with what stands for each picture."""
        first, *others = prompt.text.split(self._family.place)
        pairs = zip(pictures, others, strict=True)
        return replace(prompt, text=first + "".join(picture.result.text + rest for picture, rest in pairs))

    def place(self, token_ids: list[int], pictures: Sequence[ProcessedPicture]) -> ChatPrompt:
        """Repeat each image token as often as its run is long. Raises ApiError."""
        image_token = self._image_token_id
        counts = [count for picture in pictures for count in picture.result.counts]
        if token_ids.count(image_token) != len(counts):
            invalid("messages", f"a text contains {self._family.image_token}, which stands for a picture; leave it out")
        placed: list[int] = []
        starts: list[int] = []
        done = 0
        for count in counts:
            found = token_ids.index(image_token, done)
            placed += token_ids[done:found]
            starts.append(len(placed))
            placed += [image_token] * count
            done = found + 1
        spans = iter(zip(starts, counts, strict=True))
        return ChatPrompt(
            placed + token_ids[done:],
            tuple(PlacedPicture(tuple(next(spans) for _ in picture.result.counts), picture) for picture in pictures),
        )
