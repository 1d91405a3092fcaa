"""Prompts with pictures against transformers' own processors: token ids, places and pixels."""

from __future__ import annotations

import base64
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.gemma4.image_processing_pil_gemma4 import convert_image_to_patches
from transformers.processing_utils import ProcessorMixin

from penstock.frontend.endpoints.prompts import render_chat
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.pictures.families import FAMILIES
from penstock.frontend.pictures.placing import ChatPrompt, PictureReader, sent_pictures
from penstock.frontend.pictures.workshop import PictureWorkshop
from penstock.frontend.schemas.chat import ChatBody, ChatMessage, ContentPart
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.frontend.transport.errors import ApiError
from penstock.shm.messages import picture_digest, picture_token_ids
from tests.frontend.harness import FakeBackend
from tests.frontend.pictures.vision_models import MODELS, encoded, picture, save_vision_model

SIZES = [(90, 40), (30, 30), (41, 117)]
NESTED = ("smolvlm", "idefics3", "llava_onevision")
"""Families whose processor takes the pictures of each chat as a list."""


OTHER_PARTS: dict[str, dict[str, Any]] = {"gemma4": {"feature_extractor": None, "video_processor": None}}
"""Arguments of a processor's class that are not needed for pictures."""


def part(image: Image.Image) -> ContentPart:
    return ContentPart("image_url", image_url="data:image/png;base64," + base64.b64encode(encoded(image)).decode())


def load(directory: Path, model_type: str, workshop: PictureWorkshop) -> ServedModel:
    card = save_vision_model(directory, model_type)
    tokenizer = ModelTokenizer.load(directory)
    reader = PictureReader.of_model(card, tokenizer.added_tokens, workshop)
    backend: Any = FakeBackend(model=card)
    return ServedModel(card, tokenizer, backend, pictures=reader)


def transformers_outputs(directory: Path, model_type: str, images: list[Image.Image], text: str) -> Any:
    """What transformers' processor makes of a rendered chat."""
    model, family = MODELS[model_type], FAMILIES[model_type]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(directory / "tokenizer.json")),
        extra_special_tokens=model.named,
        pad_token="<|im_end|>",
    )
    models = "transformers.models"
    pil = importlib.import_module(f"{models}.{family.module}.image_processing_pil_{family.module}")
    image_processor = getattr(pil, f"{family.class_name}ImageProcessorPil").from_pretrained(directory)
    module = importlib.import_module(f"{models}.{model.module}.processing_{model.module}")
    processor = getattr(module, model.processor_class)(
        image_processor=image_processor, tokenizer=tokenizer, **OTHER_PARTS.get(model_type, {}), **model.settings
    )
    given = [images] if model_type in NESTED else images
    return processor(text=[text], images=given, do_rescale=False, do_normalize=False, return_tensors="np")


@pytest.mark.parametrize(("model_type", "num_pictures"), [*((name, 3) for name in MODELS), ("llava_onevision", 1)])
async def test_prompt_and_pixels_are_those_of_transformers(
    model_type: str, num_pictures: int, tmp_path: Path, workshop: PictureWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which class a part of a processor has is checked by importing packages for videos.
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    pixtral = "transformers.models.pixtral.image_processing"
    monkeypatch.setitem(sys.modules, f"{pixtral}_pixtral", importlib.import_module(f"{pixtral}_pil_pixtral"))
    served = load(tmp_path, model_type, workshop)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES[:num_pictures])]
    first, *others = map(part, images)
    body = ChatBody(
        messages=[
            ChatMessage("user", [first, ContentPart("text", "what is this?")]),
            ChatMessage("assistant", "a cat"),
            ChatMessage("user", [ContentPart("text", "and "), *others, ContentPart("text", " these?")]),
        ]
    )
    prompt = await render_chat(body, served, b"", is_long=False)
    template = served.tokenizer.chat_template
    assert template is not None
    outputs = transformers_outputs(tmp_path, model_type, images, template.render(body))
    assert prompt.token_ids == list(map(int, np.asarray(outputs["input_ids"])[0]))
    check_places(prompt, served.tokenizer.added_tokens[FAMILIES[model_type].image_token])
    pixels = np.concatenate([np.frombuffer(each.processed.pixels, np.uint8) for each in prompt.pictures])
    own = np.asarray(outputs["pixel_values"])
    if model_type == "mistral3":  # padded to the largest of a batch
        sizes = np.asarray(outputs["image_sizes"])
        own = np.concatenate([each[:, :h, :w].ravel() for each, (h, w) in zip(own, sizes, strict=True)])
    if model_type == "gemma4":  # patches, padded
        places = np.asarray(outputs["image_position_ids"])
        own = np.concatenate([each[mask] for each, mask in zip(own, places[:, :, 0] >= 0, strict=True)])
        pixels = np.concatenate(
            [
                convert_image_to_patches(
                    np.frombuffer(each.processed.pixels, np.uint8).reshape(each.processed.result.shape)[0], 4
                ).ravel()
                for each in prompt.pictures
            ]
        )
    assert np.array_equal(pixels, own.ravel())
    if "image_grid_thw" in outputs:
        assert [list(each.processed.result.grid) for each in prompt.pictures] == outputs["image_grid_thw"].tolist()


def check_places(prompt: ChatPrompt, image_token: int) -> None:
    """The spans are the places of the image token, and are sent as ids of the pictures' contents."""
    tokens, pictures, pixels = sent_pictures(prompt.token_ids, prompt.pictures)
    spans = [range(first, first + count) for sent in pictures for first, count in sent.spans]
    places = [place for span in spans for place in span]
    assert places == [place for place, token_id in enumerate(prompt.token_ids) if token_id == image_token]
    for sent, each in zip(pictures, pixels, strict=True):
        assert sent.digest == picture_digest(sent.shape, sent.grid, each)
        own = [tokens[place] for first, count in sent.spans for place in range(first, first + count)]
        assert own == list(picture_token_ids(sent.digest, sent.num_tokens))
    assert [token_id for token_id in tokens if token_id >= 0] == [
        token_id for token_id in prompt.token_ids if token_id != image_token
    ]


async def test_client_cannot_spell_a_picture(tmp_path: Path, workshop: PictureWorkshop) -> None:
    served = load(tmp_path, "smolvlm", workshop)
    image = part(picture(30, 30))
    body = ChatBody(messages=[ChatMessage("user", [ContentPart("text", "<image> is "), image])])
    prompt = await render_chat(body, served, b"", is_long=False)
    assert sum(count for placed in prompt.pictures for _, count in placed.spans) == prompt.token_ids.count(
        served.tokenizer.added_tokens["<image>"]
    )
    reads_tokens = replace(served, reads_special_tokens=True)
    with pytest.raises(ApiError, match="a text contains <image>, which stands for a picture"):
        await render_chat(body, reads_tokens, b"", is_long=False)


def test_files_that_show_no_way_make_a_model_of_texts(
    tmp_path: Path, workshop: PictureWorkshop, caplog: pytest.LogCaptureFixture
) -> None:
    card = save_vision_model(tmp_path, "smolvlm")
    assert PictureReader.of_model(card, {}, workshop) is None
    assert "test/model takes no pictures: its tokenizer has no token <image>" in caplog.text
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    assert PictureReader.of_model(card, {}, workshop) is None
    assert 'no image processor is known for model_type "other"' in caplog.text


async def test_qwens_pictures_are_made_smaller_for_the_servers_limit(tmp_path: Path, workshop: PictureWorkshop) -> None:
    card = msgspec.structs.replace(save_vision_model(tmp_path, "qwen2_5_vl"), max_picture_bytes=6 * 28**2 * 8)
    reader = PictureReader.of_model(card, ModelTokenizer.load(tmp_path).added_tokens, workshop)
    assert reader is not None
    (processed,) = await reader.read([("messages", part(picture(600, 200)))], b"")
    assert processed.result.grid == (1, 2, 8)
    assert len(processed.pixels) == 6 * 28**2 * 4
