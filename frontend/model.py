"""The model being served: the backend's card with its tokenizer, loaded when the card arrives."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from frontend.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from shm.client import BackendClient
    from shm.wire import ModelCard

_log = logging.getLogger("penstock.model")

_POLL_S = 0.02
_RELOAD_POLL_S = 1.0
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    card: ModelCard
    tokenizer: ModelTokenizer


class ModelKeeper:
    """Keeps `current` in step with the backend's model card. None until tokenizer and template are loaded."""

    def __init__(self, backend: BackendClient) -> None:
        self._backend = backend
        self._unusable: ModelCard | None = None
        self.current: ServedModel | None = None

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        num_polls = 0
        while True:
            card = self._backend.model
            num_polls += 1
            if card is None and num_polls * _POLL_S == _PATIENCE_S:
                _log.info("no backend yet; waiting for one")
            loaded = None if self.current is None else self.current.card
            if card is not None and card not in (loaded, self._unusable):
                await self._load(card)
            await asyncio.sleep(_POLL_S if card is None else _RELOAD_POLL_S)

    async def _load(self, card: ModelCard) -> None:
        try:
            tokenizer = await asyncio.to_thread(ModelTokenizer.load, Path(card.model_dir))
        except Exception as error:  # noqa: BLE001 - the tokenizer library raises plain Exception for a bad file
            # Said once; requests are answered 503 until the backend comes with another model.
            self.current, self._unusable = None, card
            _log.error("cannot serve %s: %s", card.model_id, error)
        else:
            self.current = ServedModel(card, tokenizer)
            _log.info("serving %s, context %d tokens", card.model_id, card.max_context_tokens)
