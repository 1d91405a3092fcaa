"""Runs in the Python environment of a library that is compared. Only the library penstock imports Penstock.

PYTHON library_peer.py sentence-transformers|onnxruntime|penstock MODEL_DIR DTYPE

Each line of standard input is a JSON list of texts. For each, a line of standard output has the seconds that the
vectors took, including tokenising. The first line names the versions that run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH_INPUTS = 32

Encode = Callable[[list[str]], Any]


def sentence_transformers_encoder(model_dir: str, dtype: str) -> tuple[str, Encode]:
    """Its `encode` sorts by length and pads within batches of 32."""
    import sentence_transformers
    import torch

    model = sentence_transformers.SentenceTransformer(
        model_dir, device="cpu", model_kwargs={"torch_dtype": torch.bfloat16 if dtype == "bf16" else torch.float32}
    )

    def encode(texts: list[str]) -> Any:
        return model.encode(texts, batch_size=BATCH_INPUTS, convert_to_tensor=True)

    return f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}, {dtype}", encode


def onnxruntime_encoder(model_dir: str, dtype: str) -> tuple[str, Encode]:
    """The weights are exported once, to fp32. Batches of 32, sorted by length, mean pooling in numpy."""
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    if dtype != "fp32":
        raise SystemExit("onnxruntime runs in fp32 here")
    path = Path(model_dir) / "model.onnx"
    if not path.exists():
        export_to_onnx(model_dir, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
    tokenizer.enable_padding()

    def encode(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        parts = []
        for start in range(0, len(order), BATCH_INPUTS):
            encodings = tokenizer.encode_batch([texts[index] for index in order[start : start + BATCH_INPUTS]])
            ids = np.array([encoding.ids for encoding in encodings], np.int64)
            mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
            (states,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
            parts.append((states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True))
        vectors = np.concatenate(parts)
        restored = np.empty_like(vectors)
        restored[order] = vectors
        return restored / np.linalg.norm(restored, axis=1, keepdims=True)

    return f"onnxruntime {onnxruntime.__version__}, fp32", encode


def penstock_encoder(model_dir: str, dtype: str) -> tuple[str, Encode]:
    """Our forward pass without a server: no HTTP, no link, no engine."""
    import numpy as np
    from tokenizers import Tokenizer

    from penstock.backend.forward_pass import PassOptions, PooledRows, StepBatch
    from penstock.backend.passes.encoder.forward_pass import EncoderPass

    forward_pass = EncoderPass.load(Path(model_dir), PassOptions(dtype=dtype))
    tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))

    def encode(texts: list[str]) -> Any:
        rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
        count = len(rows)
        numbers = np.arange(count, dtype=np.int32)
        none = np.zeros(count, np.int32)
        batch = StepBatch(
            input_ids=np.concatenate(rows).astype(np.int32),
            query_starts=np.cumsum([0, *map(len, rows)]).astype(np.int32),
            context_lens=none,
            page_table=np.zeros((count, 0), np.int32),
            slots=numbers,
            logit_rows=np.empty(0, np.int32),
            pooled=PooledRows(numbers, ("embed",) * count, none),
        )
        vectors = np.array(forward_pass.sample(forward_pass.forward(batch), batch).wait().pooled)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return f"penstock's pass alone, {dtype}", encode


def export_to_onnx(model_dir: str, path: Path) -> None:
    """Write the encoder with dynamic batch and length."""
    import torch
    from transformers import AutoModel

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            states: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return states

    names = ["input_ids", "attention_mask"]
    example = torch.ones((2, 8), dtype=torch.int64)
    torch.onnx.export(
        Encoder().train(mode=False),
        (example, example),
        str(path),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "batch", 1: "length"} for name in (*names, "last_hidden_state")},
        dynamo=False,
    )


ENCODERS = {
    "sentence-transformers": sentence_transformers_encoder,
    "onnxruntime": onnxruntime_encoder,
    "penstock": penstock_encoder,
}


def main() -> None:
    library, model_dir, dtype = sys.argv[1:]
    name, encode = ENCODERS[library](model_dir, dtype)
    print(json.dumps({"name": name}), flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        started_s = time.perf_counter()
        vectors = encode(texts)
        seconds = time.perf_counter() - started_s
        if len(vectors) != len(texts):
            raise SystemExit(f"{len(vectors)} vectors for {len(texts)} texts")
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
