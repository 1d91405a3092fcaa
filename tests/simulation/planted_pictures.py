"""Bugs to plant in how pictures get from requests to steps."""

from __future__ import annotations

from typing import Any

from penstock.backend.engine.pictures.desk import PictureDesk
from penstock.backend.engine.pictures.tower_thread import BadPixels
from penstock.backend.scheduling.admission import AwaitedPictures
from penstock.backend.sequences.pictures import HostRows, SequencePictures
from penstock.backend.sequences.sequence import Sequence
from penstock.shm.messages import FailureCode
from tests.simulation.planting import Plant, wrap


def _first_rows(rows_of: Any, pictures: SequencePictures, first: int, end: int) -> list[tuple[int, HostRows, int]]:
    found = []
    for token, values, span_end in rows_of(pictures, first, end):
        run = pictures._runs_from(token)[0]
        rows = pictures._cache.use(run.key)[run.offset : run.offset + values.num_rows]
        found.append((token, HostRows(rows), span_end))
    return found


def _fails_all(fail: Any, desk: PictureDesk, encoding: Any, source: Any) -> None:
    if not isinstance(encoding.error, BadPixels):
        fail(desk, encoding, source)
    elif source is not None and source[0].subscribers:
        desk._delivery.fail(source[0], FailureCode.BAD_PICTURE, str(encoding.error))


PICTURE_BUGS: dict[str, Plant] = {
    "a later chunk of a picture has its first embeddings": wrap(SequencePictures, "rows_of", _first_rows),
    "a step ends within a picture that is seen whole": wrap(Sequence, "whole_chunk", lambda *args: args[2]),
    "pixels that one request has lost fail all that share its sequence": wrap(PictureDesk, "_fail", _fails_all),
    "sequences are not looked at again when their picture is encoded": wrap(
        AwaitedPictures, "release", lambda *_: None
    ),
}
