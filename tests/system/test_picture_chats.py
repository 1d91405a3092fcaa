"""Pictures over HTTP with the real processes: a tiny random Qwen3-VL against transformers."""

from __future__ import annotations

import base64
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.frontend.pictures.vision_models import encoded, picture, save_vision_model
from tests.system.processes import Command, backends_of, descendants, running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
TEXT = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
IMAGE_TOKEN = "<|image_pad|>"
IMAGES = [picture(90, 40, 0), picture(30, 30, 1)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3-vl")
    card = save_vision_model(directory, "qwen2_5_vl")
    image_token = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(IMAGE_TOKEN)
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(
        vision_config=VISION,
        text_config=TEXT | {"vocab_size": card.vocab_size},
        image_token_id=image_token,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # so that positions and pictures count
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def serve(model_dir: Path) -> Iterator[Command]:
    options = ("--gpu", "none", "--port", "0", "--kv-budget", "64MB", "--dtype", "fp32")
    serve = Command("penstock.main", "serve", "--model", str(model_dir), *options)
    with running(serve):
        yield serve


@pytest.fixture(scope="module")
def http(serve: Command) -> Iterator[httpx.Client]:
    url = serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)
    with httpx.Client(base_url=url, timeout=90.0, verify=False) as client:  # noqa: S501
        yield client


def part(image: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(encoded(image)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


MESSAGE = {"role": "user", "content": [text("see "), part(IMAGES[0]), text(" and "), part(IMAGES[1]), text("?")]}


def ask(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | fields


def generated(model_dir: Path, prompt: str, max_tokens: int) -> tuple[list[int], list[int]]:
    """The tokens of the prompt, and those that transformers generates."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
    pictures = Qwen2VLImageProcessorPil.from_pretrained(model_dir)(IMAGES, return_tensors="pt")
    first, *others = prompt.split(IMAGE_TOKEN)
    counts = (pictures["image_grid_thw"].prod(-1) // 4).tolist()
    text = first + "".join(IMAGE_TOKEN * count + other for count, other in zip(counts, others, strict=True))
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(model_dir)
    types = (ids == model.config.image_token_id).int()
    options = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": None}
    output = model.generate(input_ids=ids, mm_token_type_ids=types, **pictures, **options)[0].tolist()
    return output[: ids.shape[1]], output[ids.shape[1] :]


def test_chat_with_pictures_has_transformers_tokens_and_finds_them_again(http: httpx.Client, model_dir: Path) -> None:
    body = ask(MESSAGE, max_tokens=24)
    answer = http.post("/v1/chat/completions", json=body).json()
    rendered = http.post("/apply-template", json=body).json()["prompt"]
    prompt, tokens = generated(model_dir, rendered, 24)
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == tokens
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    later = ask(MESSAGE, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "more"}, max_tokens=4)
    usage = http.post("/v1/chat/completions", json=later).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 16


def streamed(http: httpx.Client, serve: Command, *, kills_after: int | None) -> list[int]:
    tokens: list[int] = []
    with http.stream("POST", "/v1/chat/completions", json=ask(MESSAGE, max_tokens=1000, stream=True)) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens += choice.get("token_ids") or []
            if kills_after is not None and len(tokens) > kills_after:
                kills_after = None
                os.kill(backends_of(serve)[0], signal.SIGKILL)
    return tokens


def test_killed_backend_and_hang_ups_leave_answers_right(http: httpx.Client, serve: Command) -> None:
    whole = streamed(http, serve, kills_after=None)
    assert len(whole) == 1000
    assert streamed(http, serve, kills_after=20) == whole
    children = [pid for pid in descendants(serve.process.pid) if is_pictures(pid)]
    assert len(children) == 1
    for seed in range(4):
        body = ask({"role": "user", "content": [part(picture(2000, 1500, seed))]})
        with pytest.raises(httpx.TimeoutException):
            http.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(90.0, read=0.001))
    wait_until(lambda: not descendants(children[0]), 60.0)
    assert http.post("/v1/chat/completions", json=ask(MESSAGE, max_tokens=1)).status_code == 200


def is_pictures(pid: int) -> bool:
    return b"penstock.frontend.pictures.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
