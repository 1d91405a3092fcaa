"""A served model: its backend's model card, with the tokenizer that is loaded when the card arrives."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.frontend.formats.vectors import import_writers
from penstock.frontend.parsing.model_syntax import ModelSyntax, choose_model_syntax
from penstock.frontend.settings import ParserNames
from penstock.frontend.text.pooling_files import PoolingFiles
from penstock.frontend.text.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from penstock.frontend.generation.waking import WakingModel
    from penstock.shm.client import ServingClient
    from penstock.shm.messages import ModelCard

logger = logging.getLogger("penstock.model")

_POLL_S = 0.02
_RELOAD_POLL_S = 1.0
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

    def new_id(self, prefix: str) -> str:
        """Return the id of a new answer. A router finds this server by the mark."""
        return prefix + self.id_mark + secrets.token_hex(12)


def model_syntax_of(tokenizer: ModelTokenizer, parsers: ParserNames = ParserNames()) -> ModelSyntax:  # noqa: B008 - frozen
    template = tokenizer.chat_template
    source = None if template is None else template.tool_source
    return choose_model_syntax(source, tokenizer.added_tokens, parsers.tools, parsers.reasoning)


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
        self._unusable: ModelCard | None = None
        self.current: ServedModel | None = None
        """None until tokenizer and template are loaded."""
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
            loaded = None if self.current is None else self.current.card
            if card is not None and card not in (loaded, self._unusable):
                await self._load(card)
            await asyncio.sleep(_POLL_S if card is None else _RELOAD_POLL_S)

    def _read(self, card: ModelCard) -> ServedModel:
        if self.name not in (None, card.model_id, *card.aliases):
            raise ValueError(f"its name is not {self.name}")
        directory = Path(card.model_dir)
        tokenizer = ModelTokenizer.load(directory, self._template_file)
        if card.pooled:
            import_writers()
        pooling = PoolingFiles.load(directory) if card.pooled else PoolingFiles()
        return ServedModel(
            card, tokenizer, self.backend, model_syntax_of(tokenizer, self._parsers), pooling, self._id_mark
        )

    async def _load(self, card: ModelCard) -> None:
        self.settled.clear()
        try:
            self.current = await asyncio.to_thread(self._read, card)
        except Exception as error:  # noqa: BLE001 - the tokenizer library raises plain Exception for a bad file
            # Logged once. Requests are answered 503 until the backend serves another model.
            self.current, self._unusable = None, card
            logger.error("cannot serve %s: %s; answering 503 until the backend has another model", card.model_id, error)
        else:
            logger.info("serving %s, context %d tokens", card.model_id, card.max_context_tokens)
            if card.generates and self.current.tokenizer.chat_template is None:
                logger.warning(
                    "%s has no chat template: only /v1/completions works; --chat-template FILE gives it one",
                    card.model_id,
                )
        self.settled.set()
