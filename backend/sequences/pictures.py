"""The pictures of a prompt, and the embeddings of pictures that are kept for a while."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import FROM_EMBEDDINGS, DeviceRows
from penstock.shm.messages import Picture

PictureKey: TypeAlias = tuple[bytes, bytes]
"""(the tenant's salt, digest): what pictures with equal embeddings have in common."""


class PictureCache:
    """Embeddings by picture. Of those that no running sequence needs next, the least recently used are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._rows: dict[PictureKey, NDArray[np.float32]] = {}  # least recently used first

    def __contains__(self, key: PictureKey) -> bool:
        return key in self._rows

    def use(self, key: PictureKey) -> NDArray[np.float32]:
        rows = self._rows[key] = self._rows.pop(key)
        return rows

    def bytes_of(self, keys: set[PictureKey]) -> int:
        return sum(self._rows[key].nbytes for key in keys if key in self._rows)

    def add(self, key: PictureKey, rows: NDArray[np.float32], needed: set[PictureKey]) -> None:
        """Keep the rows, and drop others than those that are needed until the limit holds."""
        self._rows[key] = rows
        self.num_bytes += rows.nbytes
        for other in [other for other in self._rows if other not in needed and other != key]:
            if self.num_bytes <= self.max_bytes:
                return
            self.num_bytes -= self._rows.pop(other).nbytes


class _Run(NamedTuple):
    """Consecutive tokens of one picture."""

    first: int
    end: int
    key: PictureKey
    offset: int
    """The picture's row of the first token."""
    position: int
    """Its first position, see `SequencePictures.rope_positions`."""
    num_columns: int
    """Of tokens in the picture."""
    shift: int
    """What is added to the places of tokens behind it to get their positions; not above 0."""


@dataclass(frozen=True, slots=True)
class HostRows:
    """`EmbeddingRows` in an array."""

    rows: NDArray[np.float32]
    device_reads: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def read(self) -> NDArray[np.float32]:
        return self.rows

    def copy_to(self, there: DeviceRows) -> None:
        raise RuntimeError(f"rows on the host are read, not copied to {there}; this is a bug")


class SequencePictures:
    """Where a prompt's pictures are, and whether their embeddings are there."""

    def __init__(
        self, pictures: tuple[Picture, ...], salt: bytes, cache: PictureCache, *, sees_whole: bool = False
    ) -> None:
        """The spans ascend, also from picture to picture. sees_whole: the tokens of each span attend to each other both
        ways."""
        self.sees_whole = sees_whole
        self._cache = cache
        self._runs: list[_Run] = []
        self.shift = 0
        """The last run's."""
        for picture in pictures:
            offset, cells = 0, _cells(picture)
            for first, count in picture.spans:
                position = first + self.shift
                self.shift -= max(0, count - max(cells))
                end, key = first + count, (salt, picture.digest)
                self._runs.append(_Run(first, end, key, offset, position, cells[1], self.shift))
                offset += count
        self._ends = [run.end for run in self._runs]

    def _runs_from(self, token: int) -> list[_Run]:
        return self._runs[bisect_right(self._ends, token) :]

    def missing_from(self, token: int) -> tuple[PictureKey, int] | None:
        """The first picture at or behind a token that lacks its embeddings, and the token from which it does."""
        for run in self._runs_from(token):
            if run.key not in self._cache:
                return run.key, max(run.first, token)
        return None

    def ready_end(self, first: int, end: int) -> int:
        """Tokens up to which a step can compute from first on; at most end."""
        missing = self.missing_from(first)
        return end if missing is None else min(end, missing[1])

    def needed_from(self, token: int) -> set[PictureKey]:
        """The pictures at or behind the token up to the first that is missing."""
        needed = set()
        for run in self._runs_from(token):
            if run.key not in self._cache:
                break
            needed.add(run.key)
        return needed

    def rope_positions(self, first: int, end: int) -> NDArray[np.int32]:
        """`StepBatch.rope_positions` of tokens from first to end, for models with has_picture_axes.

        Rows and columns of a picture count from the position behind the text before it; the text behind it goes on
        after the largest of them.
        """
        tokens = np.arange(first, end, dtype=np.int32)
        positions = np.repeat(tokens[:, None], 3, axis=1)
        for run in self._runs:
            start, stop = max(run.first - first, 0), max(run.end - first, 0)
            places = tokens[start:stop] - run.first
            positions[start:stop] = run.position
            positions[start:stop, 1] += places // run.num_columns
            positions[start:stop, 2] += places % run.num_columns
            positions[stop:] = tokens[stop:, None] + run.shift
        return positions

    def uncut(self, end: int) -> tuple[int, int]:
        """The last and the next token, around end, at which a step may end."""
        for run in self._runs_from(end - 1)[:1]:
            if self.sees_whole and run.first < end:
                return run.first, run.end
        return end, end

    def rows_of(self, first: int, end: int) -> list[tuple[int, HostRows, int]]:
        """(token, embeddings from there on, end of its span) of the pictures' tokens from first to end, which are
        ready."""
        found = []
        for run in self._runs_from(first):
            if run.first >= end:
                break
            start, stop = max(first, run.first), min(end, run.end)
            rows = self._cache.use(run.key)[run.offset + start - run.first : run.offset + stop - run.first]
            found.append((start, HostRows(rows), run.end))
        return found


def _cells(picture: Picture) -> tuple[int, int]:
    """A token is a square of patches; for models that use no positions of it, any numbers."""
    _, rows, columns = picture.grid
    side = max(1, isqrt(rows * columns // picture.num_tokens))
    return rows // side, columns // side


def without_picture_ids(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """The tokens as a pass receives them."""
    return np.maximum(tokens, FROM_EMBEDDINGS, dtype=np.int32)
