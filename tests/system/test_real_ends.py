"""A real model's turns end: SmolLM2-135M-Instruct, also as a file that names the end of texts only."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import httpx

from tests.real_models import download_timeout
from tests.system.processes import Command, running

CHAT = "/v1/chat/completions"
TURNS = (
    ("What is the capital of France?", "Paris."), ("What is 2 + 3?", "5."), ("Name a red fruit.", "A cherry."),
    ("What do cows eat?", "Grass."), ("Say hello in Spanish.", "Hola!"), ("What colour is the sky?", "Blue."),
    ("How many days has a week?", "Seven."), ("Name an animal that can fly.", "An eagle."), ("Is ice cold?", "Yes."),
    ("Thank you. Goodbye!", "Goodbye!"),
)  # fmt: skip
"""Questions, and the answers that the conversation goes on with: the model's own could make it repeat itself."""


@download_timeout
def test_ten_turns_end_though_the_file_names_the_end_of_texts_only(real_gguf: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(real_gguf, tmp_path / "model.gguf"))
    field = gguf.GGUFReader(path, "r+").fields["tokenizer.ggml.eos_token_id"]
    field.parts[field.data[0]][0] = 0  # <|endoftext|>; in the published file it is <|im_end|>
    serve = Command("penstock.main", "serve", "--model", str(path), "--gpu", "none", "--port", "0")
    with running(serve), httpx.Client(timeout=120) as client:
        url = serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)
        serve.wait_for(r"answers end with <\|endoftext\|> \(0\), <\|im_end\|> \(2\)")
        serve.wait_for("sample with temperature 0.8, top_p 0.95, top_k 40, min_p 0.05, unless")
        messages: list[dict[str, str]] = []
        for question, answer in TURNS:
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "temperature": 0, "max_tokens": 200}
            (choice,) = client.post(url + CHAT, json=body).json()["choices"]
            assert choice["finish_reason"] == "stop", choice
            messages.append({"role": "assistant", "content": answer})
