"""Optional interfaces of a forward pass. A pass implements one by having its methods.

This module imports typing only, as `forward_pass` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from penstock.backend.forward_pass import (
        DeviceRows,
        IBatchedForwardPass,
        PassOptions,
        PassSpec,
        PendingOutput,
        StepBatch,
    )


@runtime_checkable
class IHostPages(Protocol):
    """Optional interface of a pass whose device has its own memory: evicted pages can be saved to the host, and come
    back with `StepBatch.page_restores`. The engine decides which pages are saved, and where."""

    @property
    def num_host_pages(self) -> int:
        """Fixed once the cache is created.

        0 if recomputing a page is faster than copying it there and back, or if PassOptions.host_kv_bytes holds no page.
        """

    def save_pages(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy each (page, host page) pair, after all steps launched so far; later steps may write to the pages.
        Checkpoint n has the page number num_pages + n.

        No host page occurs twice. Called between steps, not between `forward` and `sample`. An error here is fatal: the
        engine would otherwise read pages that were never saved.
        """


@runtime_checkable
class ICheckpointsStates(Protocol):
    """Optional interface of a pass with a state whose spec says copies_states: sequences with the same beginning share
    it, if a checkpoint has the state after it. The engine decides which states are kept, and where."""

    def create_checkpoints(self, num_checkpoints: int) -> None:
        """Allocate num_checkpoints * spec.state_bytes_per_sequence bytes. Called once, after `create_cache`."""


class IGuesser(Protocol):
    """The part of `IBatchedForwardPass` that a draft model uses."""

    @property
    def spec(self) -> PassSpec: ...

    def forward(self, batch: StepBatch) -> Any: ...

    def sample(self, logits: Any, batch: StepBatch) -> PendingOutput: ...

    def close(self) -> None: ...


@runtime_checkable
class IGuessesTokens(Protocol):
    """Optional interface of a pass whose model has a head that predicts the token after the next one. Its cache has the
    head's keys and values too, and each step writes them."""

    def make_guesser(self) -> IGuesser | None:
        """A pass for steps between those of this one, over the same pages: each row has one token, and its logits are a
        guess of those after it. None if the model has no such head.

        It has 4 slots of its own. The first row of a slot is for a token that no step has computed, after a SlotInit,
        with (slot of the sequence, own slot) in state_restores. Each further row is for the token after.
        """


class PagePlaces(Protocol):
    """Host pages in memory that outlives the process."""

    @property
    def num_places(self) -> int:
        """Places for pages. Those for checkpoints have higher numbers."""

    def place(self, index: int) -> NDArray[np.uint8]:
        """The memory of one place, [page bytes], for the keys and values of a page in all layers; or [state bytes]."""

    def note_written(self, index: int) -> None:
        """The pass has written the place. Called on its thread."""


@runtime_checkable
class IPersistsPages(Protocol):
    """Optional interface of a pass that is IHostPages: its host pages may be in memory that outlives the process.

    A page's content must depend only on the model's fingerprint and the row's adapter, not on the page's number.
    """

    def persist_pages(self, places: PagePlaces) -> None:
        """Use these host pages from now on. Called at most once, after `create_cache`."""


@runtime_checkable
class IDeviceLogits(Protocol):
    """Optional interface of a GPU pass: clients on the same GPU receive its logits without a copy through the host."""

    def device_logits(self, logits: Any) -> DeviceRows:
        """The logits of `forward`'s handle, [L, vocab_size]. Called before `sample`; copied in the stream's order."""


@runtime_checkable
class IHiddenStates(Protocol):
    """Optional interface: clients receive hidden states: the last layer's output after the final norm."""

    @property
    def hidden_size(self) -> int: ...

    def host_hidden_states(self, logits: Any) -> NDArray[np.float32]:
        """Hidden states of the last step, on the host: [L, hidden_size]. Called before `sample`."""


@runtime_checkable
class IDeviceHiddenStates(IHiddenStates, IDeviceLogits, Protocol):
    """Hidden states of a GPU pass. A pass that is IDeviceLogits offers hidden states only if it is this as well."""

    def device_hidden_states(self, logits: Any) -> DeviceRows:
        """Hidden states of the last step, on the device, under the same conditions as `device_logits`."""


class ReadAdapter(Protocol):
    """An adapter in the form in which the pass uses it."""

    @property
    def rank(self) -> int: ...


@runtime_checkable
class ILoadsAdapters(Protocol):
    """Optional interface of a pass whose adapters come and go while it runs."""

    def adapter_bytes(self, directory: Path) -> int:
        """The memory that the adapter will take. Any thread may call it. Raises StartupError."""

    def read_adapter(self, directory: Path) -> ReadAdapter:
        """Any thread may call it. Raises StartupError."""

    def put_adapter(self, index: int, adapter: ReadAdapter | None) -> None:
        """From the next step on this is the adapter with the index in `StepBatch.adapters`; None frees its memory.

        Called between steps, on the pass's thread.
        """


class SharedWeights(Protocol):
    """Weights in memory that outlives the process, and that other processes may use too."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_mapped(self) -> bool:
        """An earlier process packed the weights; this one did not load them."""

    @property
    def num_checks(self) -> int:
        """Parts that were compared with their checksums."""

    def check_next(self) -> str | None:
        """Compare the next part with its checksum, which takes milliseconds.

        Returns what is wrong, or nothing. After an error no later process gets these weights, and this one must end.
        Called from one thread, which need not be the pass's.
        """


@runtime_checkable
class ISharedWeights(Protocol):
    """Optional interface of a pass that leaves its weights in a file, or in `PassOptions.weights_fds`."""

    @property
    def shared_weights(self) -> SharedWeights | None:
        """None if they are not held; the log says why."""


@runtime_checkable
class IFindsSharedWeights(Protocol):
    """Optional interface of the class of a pass with `ISharedWeights`."""

    def shared_bytes(self, model_dir: Path, options: PassOptions) -> int:
        """Bytes of weights that `load` would map: they take no further memory. 0 if it would load them."""


PICTURE_CACHE_BYTES = 256_000_000
"""Embeddings of pictures that the engine keeps in the host's memory; a pass on the CPU counts them in its workspace."""


class PictureTower(Protocol):
    """Turns pictures into embeddings. Threads other than the pass's use it, one at a time."""

    @property
    def max_picture_bytes(self) -> int: ...

    @property
    def embedding_size(self) -> int: ...

    def num_tokens(self, shape: tuple[int, ...], grid: tuple[int, int, int]) -> int:
        """The number of embeddings of a picture. Raises ValueError for one that the model does not take."""

    def encode(
        self, pixels: NDArray[np.uint8], grid: tuple[int, int, int], give_way: Callable[[], None]
    ) -> NDArray[np.float32]:
        """Embeddings of `Picture.pixels`, [num_tokens, (1 + picture_layers) * embedding_size]. The same picture has the
        same bits.

        Calls give_way between its layers, which lets steps go first and may raise.
        """


@runtime_checkable
class IEncodesPictures(Protocol):
    """Optional interface: prompts may contain pictures, whose embeddings steps receive in `StepBatch.embeddings`."""

    @property
    def picture_tower(self) -> PictureTower | None:
        """None if the model takes none."""


def read_host_logits(forward_pass: IBatchedForwardPass, logits: Any) -> NDArray[np.float32]:
    """Call `host_logits`, or its default for a pass that neither has it nor inherits it."""
    if hasattr(forward_pass, "host_logits"):
        return forward_pass.host_logits(logits)
    array: NDArray[np.float32] = logits
    return array
