"""Pictures over HTTP with the real processes: a tiny random SmolVLM against transformers."""

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
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.frontend.pictures.vision_models import encoded, picture, save_vision_model
from tests.system.processes import Command, backends_of, descendants, running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
IMAGES = [picture(90, 40, 0), picture(30, 30, 1)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smolvlm")
    card = save_vision_model(directory, "smolvlm")
    image_token = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("<image>")
    torch.manual_seed(0)
    config = transformers.SmolVLMConfig(
        vision_config=VISION,
        text_config=TEXT | {"vocab_size": card.vocab_size},
        scale_factor=2,
        image_token_id=image_token,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    transformers.SmolVLMForConditionalGeneration(config).save_pretrained(directory)
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
    processor = Idefics3Processor(
        image_processor=SmolVLMImageProcessorPil.from_pretrained(model_dir), tokenizer=tokenizer, image_seq_len=4
    )
    inputs = processor(text=[prompt], images=[IMAGES], return_tensors="pt")
    model = transformers.SmolVLMForConditionalGeneration.from_pretrained(model_dir)
    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None)[0].tolist()
    start = inputs["input_ids"].shape[1]
    return output[:start], output[start:]


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
