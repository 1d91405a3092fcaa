"""Decodes a picture's file with Pillow. Runs in children only."""

from __future__ import annotations

import binascii
import io

import numpy as np
from PIL import Image, ImageOps

MAX_PIXELS = 40 << 20
_FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "MPO": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""Pillow's names of the formats that are read. MPO is a JPEG with further pictures behind the first."""
_ALIASES = {"image/jpg": "image/jpeg"}


class BadPicture(Exception):
    """The client's file cannot be used."""


def from_base64(data: bytes) -> bytes:
    """Raises BadPicture."""
    try:
        return binascii.a2b_base64(data.translate(None, b"\r\n"), strict_mode=True)
    except binascii.Error as error:
        raise BadPicture(f"not base64: {error}") from None


def decode_picture(data: bytes, media_type: str) -> Image.Image:
    """Return the first frame upright, in RGB, on white where it is transparent. Raises BadPicture."""
    Image.MAX_IMAGE_PIXELS = None  # checked below
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(set(_FORMATS) - {"MPO"}))
    except Exception:  # noqa: BLE001 - a decoder can raise anything over a client's bytes
        raise BadPicture("not a picture in PNG, JPEG, WebP or GIF") from None
    found = _FORMATS[str(image.format)]
    if media_type and _ALIASES.get(media_type, media_type) != found:
        raise BadPicture(f"it is {found}, but is sent as {media_type}")
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadPicture(f"{width} x {height} are {width * height} pixels; the limit is {MAX_PIXELS}")
    try:
        image.load()
        return _in_rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the same
        raise BadPicture(f"{found} that cannot be decoded: {error}") from None


def _in_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # gray with 16 bits, which Pillow would cut off at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
