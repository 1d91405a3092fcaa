"""Files of pictures: what is read, and how each abuse of them ends."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from penstock.frontend.pictures import workshop as workshop_module
from penstock.frontend.pictures.decoding import MAX_PIXELS, BadPicture, decode_picture, from_base64
from penstock.frontend.pictures.messages import PictureJob
from penstock.frontend.pictures.workshop import EncodedPicture, PictureWorkshop, ProcessedPicture
from penstock.frontend.transport.errors import ApiError, ErrorKind
from tests.frontend.pictures.vision_models import encoded, picture, save_vision_model
from tests.shm.client.harness import until


def decoded(data: bytes, media_type: str = "") -> np.ndarray[Any, Any]:
    image = decode_picture(data, media_type)
    assert image.mode == "RGB"
    return np.asarray(image)


def in_colors(*colors: tuple[int, ...] | int, mode: str = "RGB") -> Image.Image:
    """A picture of one row."""
    image = Image.new(mode, (len(colors), 1))
    image.putdata(colors)
    return image


RED, BLUE, WHITE = [255, 0, 0], [0, 0, 255], [255, 255, 255]


@pytest.mark.parametrize(
    ("image", "form", "pixels"),
    [
        (in_colors((255, 0, 0, 255), (255, 0, 0, 0), mode="RGBA"), "PNG", [RED, WHITE]),
        (in_colors((255, 0, 0), (0, 0, 255)).quantize(2), "PNG", [RED, BLUE]),
        (in_colors(0, 255, mode="L"), "PNG", [[0, 0, 0], WHITE]),
        (in_colors(0, 1, mode="1"), "PNG", [[0, 0, 0], WHITE]),
        (in_colors((0, 255), (0, 0), mode="LA"), "PNG", [[0, 0, 0], WHITE]),
        (Image.fromarray(np.array([[0x8000, 0xFFFF]], np.uint16)), "PNG", [[128, 128, 128], WHITE]),
        (in_colors((0, 255, 255, 0), (255, 255, 0, 0), mode="CMYK").resize((2, 1)), "JPEG", None),
        (in_colors((255, 0, 0), (255, 0, 0)), "WEBP", [RED, RED]),
        (in_colors((255, 0, 0), (0, 0, 255)), "GIF", [RED, BLUE]),
    ],
)
def test_all_kinds_of_pixels_become_rgb(image: Image.Image, form: str, pixels: list[list[int]] | None) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    found = decoded(encoded(image, form, **options))
    assert found.shape == (1, 2, 3)
    if pixels is not None:
        assert found[0].tolist() == pixels


def test_first_frame_is_shown_upright() -> None:
    first, second = picture(8, 4), picture(8, 4, 1)
    animated = encoded(first.quantize(), "GIF", save_all=True, append_images=[second])
    assert np.array_equal(decoded(animated), np.asarray(first.quantize().convert("RGB")))
    exif = Image.Exif()
    exif[TiffImagePlugin.IMAGEWIDTH], exif[0x0112] = 8, 6  # to be turned to the right
    turned = decoded(encoded(first, "PNG", exif=exif))
    assert np.array_equal(turned, np.rot90(np.asarray(first), -1))


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that says it is large, without its pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


PNG, JPEG = encoded(picture(40, 40)), encoded(picture(40, 40), "JPEG", quality=95)


@pytest.mark.parametrize(
    ("data", "media_type", "message"),
    [
        (b"", "", "not a picture in PNG, JPEG, WebP or GIF"),
        (b"GIF89a", "", "not a picture in PNG, JPEG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", "not a picture in PNG, JPEG, WebP or GIF"),
        (encoded(picture(4, 4), "BMP"), "", "not a picture in PNG, JPEG, WebP or GIF"),
        (PNG, "image/jpeg", "it is image/png, but is sent as image/jpeg"),
        (JPEG, "image/png", "it is image/jpeg, but is sent as image/png"),
        (PNG[:-40], "image/png", "image/png that cannot be decoded"),
        (JPEG[:-100], "", "image/jpeg that cannot be decoded"),
        (png_of_size(60_000, 60_000), "", f"60000 x 60000 are 3600000000 pixels; the limit is {MAX_PIXELS}"),
        (png_of_size(100, 100), "", "image/png that cannot be decoded"),
    ],
)
def test_bad_file_is_refused_with_the_reason(data: bytes, media_type: str, message: str) -> None:
    with pytest.raises(BadPicture) as refused:
        decode_picture(data, media_type)
    assert message in str(refused.value)


def test_base64_is_read_with_line_breaks_and_nothing_else() -> None:
    assert from_base64(base64.encodebytes(PNG)) == PNG
    for text in (b"iVBOR", b"iV BO", b"####", b"iVBO\xff"):
        with pytest.raises(BadPicture, match="not base64"):
            from_base64(text)


@pytest.fixture
def job(tmp_path: Path) -> PictureJob:
    card = save_vision_model(tmp_path, "smolvlm")
    return PictureJob(card.model_dir, "smolvlm", "", is_base64=False, is_alone=True, max_bytes=card.max_picture_bytes)


async def process(workshop: PictureWorkshop, job: PictureJob, data: bytes, tenant: bytes = b"") -> ProcessedPicture:
    return await workshop.process(EncodedPicture("images[0]", data, is_base64=False), job, tenant)


async def test_bad_picture_is_one_error_that_names_it_and_the_next_one_is_processed(
    workshop: PictureWorkshop, job: PictureJob
) -> None:
    with pytest.raises(ApiError) as refused:
        await process(workshop, job, PNG[:-40])
    assert refused.value.param == "images[0]"
    assert refused.value.message.startswith("images[0]: image/png that cannot be decoded")
    found = await process(workshop, job, PNG)
    assert found.result.shape == (5, 3, 32, 32)
    assert await process(workshop, job, PNG) is found  # kept
    assert await process(workshop, job, PNG, b"other") is not found


@pytest.mark.parametrize(("width", "height"), [(1, 3000), (3000, 1), (1, 1)])
async def test_odd_size_is_processed_or_refused(
    width: int, height: int, workshop: PictureWorkshop, tmp_path: Path
) -> None:
    card = save_vision_model(tmp_path, "qwen2_5_vl")
    job = PictureJob(card.model_dir, "qwen2_5_vl", "", is_base64=False, is_alone=True, max_bytes=1 << 20)
    data = encoded(Image.new("RGB", (width, height)))
    if width == height:
        assert (await process(workshop, job, data)).result.counts
        return
    with pytest.raises(ApiError, match=f"the model's image processor takes no picture of {width} x {height}: "):
        await process(workshop, job, data)


async def test_picture_with_more_pixels_than_the_model_takes_is_refused(
    workshop: PictureWorkshop, job: PictureJob
) -> None:
    small = PictureJob(job.model_dir, job.family, "", is_base64=False, is_alone=True, max_bytes=1000)
    with pytest.raises(ApiError, match="it makes 15360 bytes of pixels; the limit of this model is 1000"):
        await process(workshop, small, PNG)


def forks_of(workshop: PictureWorkshop) -> list[int]:
    child = workshop._child
    if child is None:
        return []
    return list(map(int, Path(f"/proc/{child[0].pid}/task/{child[0].pid}/children").read_text().split()))


@pytest.fixture
def slow_job(job: PictureJob) -> PictureJob:
    """The model's processor takes very long: it cuts the picture into a million tiles."""
    return with_sizes(job, {"height": 6000, "width": 6000}, tile=6)


def with_sizes(job: PictureJob, size: dict[str, int], tile: int) -> PictureJob:
    settings = {"size": size, "max_image_size": {"longest_edge": tile}}
    path = Path(job.model_dir) / "preprocessor_config.json"
    path.write_text(json.dumps({"image_processor_type": "SmolVLMImageProcessor", **settings}), encoding="utf-8")
    return job


async def test_picture_that_takes_too_much_memory_is_refused(workshop: PictureWorkshop, job: PictureJob) -> None:
    greedy = with_sizes(job, {"height": 20_000, "width": 20_000}, tile=512)
    with pytest.raises(ApiError, match="decoding it takes more memory than the limit of 1024 MiB"):
        await process(workshop, greedy, PNG)


async def test_hang_up_ends_the_fork_and_others_are_served_meanwhile(
    workshop: PictureWorkshop, slow_job: PictureJob, tmp_path_factory: pytest.TempPathFactory
) -> None:
    card = save_vision_model(tmp_path_factory.mktemp("quick"), "idefics3")
    quick = PictureJob(card.model_dir, "idefics3", "", is_base64=False, is_alone=True, max_bytes=1 << 20)
    waiting = asyncio.create_task(process(workshop, slow_job, PNG))
    await process(workshop, quick, JPEG, b"other")
    await until(lambda: len(forks_of(workshop)) == 1)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: not forks_of(workshop))
    assert (await process(workshop, quick, PNG)).result.counts


async def test_picture_that_takes_too_much_time_is_refused(workshop: PictureWorkshop, slow_job: PictureJob) -> None:
    with pytest.raises(ApiError, match=r"decoding it takes more than the limit of 10 s of CPU time or 1024 MiB"):
        await process(workshop, msgspec.structs.replace(slow_job, cpu_time_s=0.01), PNG)


async def test_killed_child_is_replaced(workshop: PictureWorkshop, job: PictureJob) -> None:
    await process(workshop, job, PNG)
    child = workshop._child
    assert child is not None
    child[0].kill()
    child[0].wait()
    assert (await process(workshop, job, JPEG)).result.shape == (5, 3, 32, 32)


async def test_unusable_processor_is_the_servers_fault(
    workshop: PictureWorkshop, job: PictureJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ApiError) as refused:
        await process(workshop, job, PNG)
    assert refused.value.kind is ErrorKind.INTERNAL
    assert "cannot process pictures: OSError" in caplog.text


async def test_flood_of_one_tenant_leaves_places_and_turns_to_others(
    workshop: PictureWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = workshop_module._Turns()
    order: list[bytes] = []
    go = asyncio.Event()

    async def work(tenant: bytes) -> None:
        async with turns.of(tenant):
            order.append(tenant)
            await go.wait()

    tasks = [asyncio.create_task(work(b"a")) for _ in range(5)]
    tasks.append(asyncio.create_task(work(b"b")))
    await until(lambda: len(order) == 4)
    assert order == [b"a", b"a", b"a", b"b"]
    tasks[3].cancel()  # one that waits
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order.count(b"a") == 4
    assert not turns._waiting
    full = PictureWorkshop()
    for _ in range(workshop_module._MAX_WAITING):
        full._places.take(b"a")
    with pytest.raises(ApiError) as refused, full.place("images[0]", b"a"):
        pass
    assert refused.value.kind is ErrorKind.OVERLOADED
    with full.place("images[0]", b"b"):
        pass
