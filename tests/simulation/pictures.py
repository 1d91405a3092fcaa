"""Pictures in prompts: their pixels are the tokens that their embeddings count as. A vision tower encodes them when the
world says so, and fails now and then."""

from __future__ import annotations

import queue
from array import array
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backend.engine.pictures.desk import PictureDesk
from penstock.backend.engine.pictures.tower_thread import BadPixels, Encoding, EncodingCancelled, _read
from penstock.backend.forward_pass import FROM_EMBEDDINGS
from penstock.backend.sequences.pictures import PictureCache
from penstock.shm.memory.arena import DescriptorError
from penstock.shm.messages import ArenaRef, Picture, picture_digest, picture_token_ids
from tests.simulation.violations import PlantedFault, Violation

if TYPE_CHECKING:
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.scheduling.admission import AwaitedPictures
    from penstock.backend.sequences.pictures import SequencePictures
    from penstock.shm.messages import Generate
    from tests.simulation.world import World

_GRID = (1, 1, 1)
_FAULT_RATE = 0.1


class PixelStore:
    """One frontend's pixels, until the request ends for it."""

    def __init__(self) -> None:
        self._pixels: dict[ArenaRef, bytes] = {}
        self._refs: dict[int, list[ArenaRef]] = {}
        self._num_stored = 0

    def present(
        self, prompt: list[int], spans: tuple[tuple[int, int], ...], request_id: int
    ) -> tuple[list[int], tuple[Picture, ...]]:
        """The prompt's tokens with pictures at the spans (first, count), and the pictures."""
        tokens, pictures, refs = list(prompt), [], []
        for first, count in spans:
            pixels = array("i", prompt[first : first + count]).tobytes()
            refs.append(ArenaRef(0, self._num_stored, len(pixels)))
            self._num_stored += 1
            self._pixels[refs[-1]] = pixels
            digest = picture_digest((count, 4), _GRID, pixels)
            tokens[first : first + count] = picture_token_ids(digest, count)
            pictures.append(Picture(((first, count),), digest, (count, 4), _GRID, refs[-1]))
        self._refs[request_id] = refs
        return tokens, tuple(pictures)

    def read(self, ref: ArenaRef) -> memoryview:
        if ref not in self._pixels:
            raise DescriptorError("the pixels are freed")
        return memoryview(self._pixels[ref])

    def free(self, request_id: int) -> None:
        for ref in self._refs.pop(request_id, []):
            del self._pixels[ref]


def take_embeddings(batch: StepBatch, ids: list[int]) -> None:
    """Put tokens in the place of embeddings, whose only value they are."""
    for given in batch.embeddings:
        tokens = [int(row[0]) for row in given.values.read()]
        place = slice(given.first, given.first + len(tokens))
        if ids[place] != [FROM_EMBEDDINGS] * len(tokens):
            raise Violation(f"embeddings are given for the tokens {ids[place]}")
        ids[place] = tokens
    if min(ids) <= FROM_EMBEDDINGS:
        raise Violation("a token whose embedding is not given, or a picture's id")
    lengths = np.diff(batch.query_starts)
    ends = np.repeat(batch.context_lens + lengths, lengths)
    if batch.visible_ends is not None and (batch.visible_ends > ends).any():
        raise Violation("a token sees one that is not computed")


class SimulatedTower:
    """Stands in for `TowerThread` and its tower."""

    max_picture_bytes = 1 << 20
    embedding_size = 1

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = Random(f"tower {world.tick} {len(world.asks)}")
        self.results: queue.SimpleQueue[Encoding] = queue.SimpleQueue()
        self.encoding: Encoding | None = None

    def num_tokens(self, shape: tuple[int, ...], _grid: tuple[int, int, int]) -> int:
        return shape[0]

    def encode(self, pixels: Any, _grid: tuple[int, int, int], _give_way: Any) -> Any:
        return pixels.reshape(-1).view(np.int32).astype(np.float32)[:, None]

    def start(self, encoding: Encoding) -> None:
        if self.encoding is not None:
            raise Violation("two pictures are encoded at a time")
        self.encoding = encoding

    def advance(self) -> None:
        """End the encoding, if there is one."""
        encoding, covered = self.encoding, self._world.covered
        if encoding is None:
            return
        self.encoding = None
        try:
            pixels = _read(encoding)
            if encoding.is_cancelled:
                raise EncodingCancelled
            if self._world.setup.rates["fault"] and self._world.may_fail and self._rng.random() < _FAULT_RATE:
                raise PlantedFault("in the tower")
            encoding.rows = self.encode(pixels, _GRID, None)
        except (BadPixels, EncodingCancelled, PlantedFault) as error:
            encoding.error = error
        covered["encoded" if encoding.error is None else f"encoding: {type(encoding.error).__name__}"] += 1
        self.results.put(encoding)


class JudgedDesk(PictureDesk):
    """Tells the judge whose requests a failed tower may fail."""

    def __init__(self, world: World, tower: SimulatedTower, awaited: AwaitedPictures, delivery: Any) -> None:
        cache = PictureCache(4 * world.setup.picture_cache_tokens)
        super().__init__(tower, cache, 4, awaited, delivery, sees_whole=world.setup.sees_whole)
        self._world = world

    def pictures_of(self, message: Generate) -> SequencePictures | None:
        pictures = super().pictures_of(message)
        self._world.covered["pictures found again"] += pictures is not None and pictures.missing_from(0) is None
        return pictures

    def _fail(self, encoding: Encoding, source: Any) -> None:
        if not isinstance(encoding.error, BadPixels):
            self._world.backend.broken |= {each for each, key in self._awaited.missing() if key == encoding.key}
        super()._fail(encoding, source)

    def judge_end(self) -> None:
        if self._running is not None or self._awaited.num_sequences or self._awaited.missing():
            raise Violation("pictures are awaited that nobody needs")
        if self._cache.num_bytes != sum(rows.nbytes for rows in self._cache._rows.values()):
            raise Violation(f"the embeddings that are kept are counted as {self._cache.num_bytes} bytes")
        if self._cache.num_bytes > self._cache.max_bytes:
            raise Violation(f"{self._cache.num_bytes} bytes of embeddings; the limit is {self._cache.max_bytes}")
