"""Adapters that a decoder reads while it runs: the part of `ILoadsAdapters` that passes share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.tensor_files.lora_adapter import PeftAdapter
    from penstock.backend.passes.decoder.model import DecoderModel
    from penstock.backend.passes.ops.interface import LinearAdapters


@dataclass(frozen=True, slots=True)
class _ReadAdapter:
    rank: int
    of_linears: list[Any]


class LoadsAdapters(ABC):
    """The pass sets these attributes before it uses a method."""

    _config: DecoderConfig
    _model: DecoderModel
    _turns_heads: bool
    """As `turns_heads` of the checkpoint."""
    _of_linears: LinearAdapters | None
    """None if no adapter ever comes."""

    @abstractmethod
    def _num_bytes(self, adapter: PeftAdapter) -> int:
        """Memory of the adapter."""

    def adapter_bytes(self, directory: Path) -> int:
        with self._open_adapter(directory) as adapter:
            return self._num_bytes(adapter)

    def read_adapter(self, directory: Path) -> _ReadAdapter:
        with self._open_adapter(directory) as adapter:
            return _ReadAdapter(adapter.rank, self._model.read_adapter(self._adapters, adapter))

    def put_adapter(self, index: int, adapter: _ReadAdapter | None) -> None:
        self._model.put_adapter(self._adapters, index, None if adapter is None else adapter.of_linears)

    def _put_first(self, adapters: Sequence[PeftAdapter]) -> None:
        """Put the adapters of `PassOptions`."""
        for index, adapter in enumerate(adapters):
            self._model.put_adapter(self._adapters, index, self._model.read_adapter(self._adapters, adapter))

    @property
    def _adapters(self) -> LinearAdapters:
        if self._of_linears is None:
            raise RuntimeError("an adapter comes, but the pass was loaded for none; this is a bug")
        return self._of_linears

    def _open_adapter(self, directory: Path) -> PeftAdapter:
        from penstock.backend.checkpoint.tensor_files.lora_adapter import PeftAdapter

        return PeftAdapter(directory, self._config, is_turned=self._turns_heads)
