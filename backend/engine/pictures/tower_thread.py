"""The thread that encodes pictures, one at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.backend.engine.pictures.device_turns import DeviceTurns
from penstock.backend.forward_pass import IBatchedForwardPass
from penstock.backend.forward_pass.extensions import IEncodesPictures, PictureTower
from penstock.backend.sequences.pictures import PictureKey
from penstock.shm.memory.arena import DescriptorError
from penstock.shm.messages import ArenaRef, Picture, picture_digest

_CLOSE_TIMEOUT_S = 10.0


class BadPixels(Exception):
    """The pixels are gone, or are not those of the digest: the fault of the frontend that holds them."""


class EncodingCancelled(Exception):
    """No sequence needs the picture any more."""


@dataclass(slots=True, eq=False)
class Encoding:
    """One picture on its way through the tower. Its last fields are set before it is in the results."""

    key: PictureKey
    picture: Picture
    read_pixels: Callable[[ArenaRef], memoryview]
    is_cancelled: bool = False
    rows: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    error: Exception | None = None


class TowerThread:
    """Runs encodings in order. An error ends its encoding alone."""

    def __init__(self, tower: PictureTower, turns: DeviceTurns, wake: Callable[[], None]) -> None:
        """wake is called when an encoding has ended."""
        self.tower = tower
        self._turns = turns
        self._wake = wake
        self._encodings: queue.SimpleQueue[Encoding | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[Encoding] = queue.SimpleQueue()
        self._current: Encoding | None = None
        self._thread = threading.Thread(target=self._run, name="tower", daemon=True)
        self._thread.start()

    def start(self, encoding: Encoding) -> None:
        self._encodings.put(encoding)

    def close(self) -> None:
        """End the thread after the layer that it computes."""
        if (current := self._current) is not None:
            current.is_cancelled = True
        self._encodings.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)  # it may wait for a step that hangs

    def _run(self) -> None:
        while (encoding := self._encodings.get()) is not None:
            self._current = encoding
            try:
                encoding.rows = self._encode(encoding)
            except Exception as error:  # noqa: BLE001 - the desk fails the requests that need the picture
                encoding.error = error
            self._current = None
            self.results.put(encoding)
            self._wake()

    def _encode(self, encoding: Encoding) -> NDArray[np.float32]:
        picture = encoding.picture
        pixels = _read(encoding)

        def give_way() -> None:
            if encoding.is_cancelled:
                raise EncodingCancelled
            if self._turns.is_awaited:
                self._turns.__exit__(None, None, None)
                self._turns.__enter__()

        with self._turns:
            rows = self.tower.encode(pixels, picture.grid, give_way)
        if len(rows) != picture.num_tokens or not np.isfinite(rows).all():
            raise ValueError(f"the tower made {len(rows)} rows of {picture.num_tokens}, or not all are finite")
        return rows


def start_tower(forward_pass: IBatchedForwardPass, turns: DeviceTurns, wake: Callable[[], None]) -> TowerThread | None:
    """None for a model that takes no pictures."""
    tower = forward_pass.picture_tower if isinstance(forward_pass, IEncodesPictures) else None
    return None if tower is None else TowerThread(tower, turns, wake)


def _read(encoding: Encoding) -> NDArray[np.uint8]:
    """The pixels. Raises BadPixels."""
    picture = encoding.picture
    if picture.pixels is None:
        raise BadPixels("no pixels")
    try:
        pixels = encoding.read_pixels(picture.pixels)
    except DescriptorError as error:
        raise BadPixels(str(error)) from None
    if picture_digest(picture.shape, picture.grid, pixels) != picture.digest:
        raise BadPixels("the pixels are not those of the digest")
    return np.frombuffer(pixels, np.uint8).reshape(picture.shape)
