"""A served model: its backend's model card, with the tokenizer that is loaded when the card arrives."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.formats.vectors import import_writers
from penstock.frontend.parsing.syntax.fill_in import find_fill_in
from penstock.frontend.parsing.syntax.model_syntax import ModelSyntax, choose_model_syntax
from penstock.frontend.pictures.placing import PictureReader
from penstock.frontend.pictures.workshop import PictureWorkshop
from penstock.frontend.schemas.answers import EndToken, SamplingDefaults
from penstock.frontend.settings import ParserNames
from penstock.frontend.text.pooling_files import PoolingFiles
from penstock.frontend.text.spellings import NO_SPELLINGS, Spellings
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.frontend.text.turn_ends import find_turn_ends
from penstock.shm.memory.model_table import ModelState
from penstock.shm.messages import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.frontend.generation.models.waking import WakingModel
    from penstock.shm.client import ServingClient
    from penstock.shm.messages import ModelCard

logger = logging.getLogger("penstock.model")

_POLL_S = 0.02
_RELOAD_POLL_S = 1.0
_MAX_REASON = 500
_EXPECTED_START_S = 2.0
"""A line is logged if no backend has come by then."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    card: ModelCard
    tokenizer: ModelTokenizer
    backend: ServingClient
    syntax: ModelSyntax = ModelSyntax()  # noqa: RUF009 - frozen
    pooling: PoolingFiles = PoolingFiles()  # noqa: RUF009 - frozen
    """Empty unless the model computes vectors."""
    id_mark: str = ""
    turn_end_ids: tuple[int, ...] = ()
    """End tokens that the chat template shows and the model's files do not name."""
    reads_special_tokens: bool = False
    """Whether special tokens that a client spells in a chat are these tokens."""
    takes_token_ids: bool = True
    """Whether a client may send token ids where vectors are computed."""
    truncates_inputs: bool = False
    """Whether inputs that are too long for the model's vectors are truncated, unless the request says otherwise."""
    pictures: PictureReader | None = None
    """None if the model takes no pictures."""

    @property
    def takes_pictures(self) -> bool:
        return self.pictures is not None

    @property
    def spellings(self) -> Spellings:
        """The texts of special tokens that stay texts in a chat."""
        return NO_SPELLINGS if self.reads_special_tokens else self.tokenizer.spellings()

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self.card.eos_token_ids + self.turn_end_ids

    def new_id(self, prefix: str) -> str:
        """Return the id of a new answer. A router finds this server by the mark."""
        return prefix + self.id_mark + secrets.token_hex(12)


def model_syntax_of(tokenizer: ModelTokenizer, parsers: ParserNames = ParserNames()) -> ModelSyntax:  # noqa: B008 - frozen
    syntax = choose_model_syntax(tokenizer.chat_template, tokenizer.added_tokens, parsers.tools, parsers.reasoning)
    return replace(syntax, fill_in=find_fill_in(tokenizer))


def find_unnamed_ends(named: tuple[int, ...], tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """Return the end tokens that only the chat template shows."""
    return tuple(token_id for token_id in find_turn_ends(tokenizer) if token_id not in named)


class ModelKeeper:
    """Loads the tokenizer and chat template for the backend's model card; again when the card changes."""

    def __init__(
        self,
        backend: ServingClient,
        parsers: ParserNames = ParserNames(),  # noqa: B008 - frozen
        template_file: Path | None = None,
        *,
        name: str | None = None,
        id_mark: str = "",
        reports_absence: bool = True,
        workshop: PictureWorkshop | None = None,
    ) -> None:
        """template_file replaces the model's chat template. name is the model's, if it is known before its backend has
        come: a backend with another model is not used. id_mark is part of the answers' ids. reports_absence logs a line
        if no backend comes soon."""
        self.backend = backend
        self.name = name
        self.waking: WakingModel | None = None
        """None if the model is always awake."""
        self._id_mark = id_mark
        self._reports_absence = reports_absence
        self._parsers = parsers
        self._template_file = template_file
        self._workshop = workshop or PictureWorkshop()
        self._unusable: ModelCard | None = None
        self.current: ServedModel | None = None
        """None until tokenizer and template are loaded."""
        self.failure: str | None = None
        """Why the backend's model cannot be used; None if it can, or if there is none."""
        self.settled = asyncio.Event()
        """Unset while `current` may change soon: a model is loading, or no backend has been found since the start."""

    async def watch(self) -> None:
        """Watch the backend's card. Runs until cancelled."""
        if self.waking is not None:
            await self.waking.first_load.wait()
        logs_at_s = time.monotonic() + _EXPECTED_START_S if self._reports_absence else math.inf
        while True:
            card = self.backend.model
            if card is None and time.monotonic() >= logs_at_s:
                logs_at_s = math.inf
                logger.info("no backend yet; waiting for one")
            self.take_adapters()
            loaded = None if self.current is None else self.current.card
            if self.waking is not None and self.waking.state is ModelState.ASLEEP:
                self.failure, self._unusable = None, None  # its files may have been repaired when it wakes
            elif card is not None and card not in (loaded, self._unusable):
                await self._load(card)
            await asyncio.sleep(_POLL_S if card is None else _RELOAD_POLL_S)

    def take_adapters(self) -> None:
        """Take over the adapters of the backend's card if nothing else of it is new: the tokenizer stays."""
        card, current = self.backend.model, self.current
        if card is None or current is None or card is current.card:
            return
        if msgspec.structs.replace(card, adapters=current.card.adapters) == current.card:
            self.current = replace(current, card=card)

    def _read(self, card: ModelCard) -> ServedModel:
        if self.name not in (None, card.model_id, *card.aliases):
            raise ValueError(f"its name is not {self.name}")
        directory = Path(card.model_dir)
        tokenizer = ModelTokenizer.load(directory, self._template_file)
        if card.pooled:
            import_writers()
        pooling = PoolingFiles.load(directory) if card.pooled else PoolingFiles()
        syntax = model_syntax_of(tokenizer, self._parsers)
        ends = find_unnamed_ends(card.eos_token_ids, tokenizer) if card.generates else ()
        parsers = self._parsers
        truncates = pooling.has_own_limit if parsers.truncates_inputs is None else parsers.truncates_inputs
        return ServedModel(
            card,
            tokenizer,
            self.backend,
            syntax,
            pooling,
            self._id_mark,
            ends,
            reads_special_tokens=parsers.special_tokens == "tokens",
            takes_token_ids=parsers.takes_token_ids,
            truncates_inputs=truncates,
            pictures=PictureReader.of_model(card, tokenizer.added_tokens, self._workshop),
        )

    async def _load(self, card: ModelCard) -> None:
        self.settled.clear()
        self.failure = None
        try:
            self.current = await asyncio.to_thread(self._read, card)
        except Exception as error:  # noqa: BLE001 - a damaged file can raise anything
            # Logged once. Requests are answered 503 until the backend serves another model.
            self.current, self._unusable = None, card
            self.failure = " ".join(str(error).split())[:_MAX_REASON] or type(error).__name__
            logger.error(
                "cannot serve %s: %s; answering 503 until the backend has another model", card.model_id, self.failure
            )
        else:
            _log(self.current)
        self.settled.set()


def named_tokens(token_ids: Iterable[int], tokenizer: ModelTokenizer) -> list[EndToken]:
    return [EndToken(token_id, tokenizer.token_bytes.text_and_bytes(token_id)[0]) for token_id in token_ids]


def shown_sampling(sampling: Sampling) -> SamplingDefaults:
    return SamplingDefaults(**{name: getattr(sampling, name) for name in SamplingDefaults.__struct_fields__})


def describe_sampling(shown: SamplingDefaults) -> str:
    """Name the temperature, and the settings that change something."""
    neutral = msgspec.structs.asdict(shown_sampling(Sampling()))
    settings = msgspec.structs.asdict(shown).items()
    return ", ".join(f"{name} {value:g}" for name, value in settings if name == "temperature" or value != neutral[name])


def describe_ends(tokens: Iterable[EndToken]) -> str:
    return ", ".join(f"{token.text} ({token.id})" for token in tokens)


def _log(served: ServedModel) -> None:
    card = served.card
    ends = describe_ends(named_tokens(served.end_token_ids, served.tokenizer))
    shown = f"; answers end with {ends}" if ends and card.generates else ""
    logger.info("serving %s, context %d tokens%s", card.model_id, card.max_context_tokens, shown)
    if not card.generates:
        return
    sampling = describe_sampling(shown_sampling(card.default_sampling))
    logger.info("requests to %s sample with %s, unless they say otherwise", card.model_id, sampling)
    if served.tokenizer.chat_template is None:
        logger.warning(
            "%s has no chat template: only /v1/completions works; --chat-template FILE gives it one", card.model_id
        )
    if not ends:
        logger.warning(
            "%s names no token that ends an answer, so answers run to max_tokens: its tokenizer_config.json may name "
            "one as eos_token, its generation_config.json as eos_token_id",
            card.model_id,
        )
