"""Train the demo model and write its checkpoint: `python -m penstock.tools.demo_model.train`.

It reads only the running Python installation (see `corpus`). With the defaults, two free CPU cores take less than half
an hour. The same interpreter, seed and number of steps give the same model up to the order of float additions.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import jinja2
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional

from penstock.tools.demo_model.corpus import Corpus, build_corpus
from penstock.tools.demo_model.network import Dimensions, Network, hf_config

MODEL_DIR = Path(__file__).parents[2] / "backend" / "demo_model"
SPECIAL_TOKENS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
BOS_ID, END_ID = 0, 4
SHORT_WINDOW, LONG_WINDOW = 256, 2048
LONG_EVERY = 8
"""Every LONG_EVERY-th step, from the first on, trains on LONG_WINDOW tokens. Long windows cost more, but a short last
phase of them is not enough for a model trained on short ones: when tried, the loss tripled and stayed there."""


@cyclopts.Parameter(name="*")
@dataclass(frozen=True, slots=True)
class TrainingOptions:
    out: Path = MODEL_DIR
    """Folder for the checkpoint; it must hold chat_template.jinja."""
    minutes: Annotated[float, cyclopts.Parameter(validator=cyclopts.validators.Number(gt=0))] = 25.0
    """Limit of the training time, in minutes."""
    steps: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gt=0))] = 2500
    """Limit of the training steps."""
    batch_tokens: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=LONG_WINDOW))] = 2048
    """Tokens per step."""
    learning_rate: Annotated[float, cyclopts.Parameter(validator=cyclopts.validators.Number(gt=0))] = 6e-3
    """Peak learning rate of both optimizers."""
    vocab_size: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=512))] = 4096
    hidden: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=64))] = 256
    layers: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=1))] = 4
    intermediate: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=64))] = 640
    threads: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=1))] = 2
    seed: int = 0


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer: it restores any text byte for byte, and begins a prompt with <|endoftext|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    replies = [message["content"] for chat in corpus.chats for message in chat]
    tokenizer.train_from_iterator([*corpus.texts, *replies], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL_TOKENS[BOS_ID]} $A",
        pair=f"{SPECIAL_TOKENS[BOS_ID]} $A $B",
        special_tokens=[(SPECIAL_TOKENS[BOS_ID], BOS_ID)],
    )
    return tokenizer


def encode_documents(corpus: Corpus, tokenizer: Tokenizer, chat_template: str) -> list[NDArray[np.int32]]:
    """Token ids of every training document. Each begins with <|endoftext|>; chats are rendered by the template."""
    template = jinja2.Environment(autoescape=False).from_string(chat_template)  # noqa: S701  # tokens, not HTML
    chats = [template.render(messages=chat, bos_token=SPECIAL_TOKENS[BOS_ID]) for chat in corpus.chats]
    encodings = tokenizer.encode_batch_fast(corpus.texts)
    encodings += tokenizer.encode_batch_fast(chats, add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]


def windows(documents: list[NDArray[np.int32]], length: int, rng: np.random.Generator) -> Iterator[NDArray[np.int32]]:
    """Yield windows of length + 1 tokens over the packed documents without end; every epoch shuffles them again."""
    while True:
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        for start in range(int(rng.integers(length)), len(stream) - length, length):
            yield stream[start : start + length + 1]


def batch_loss(network: Network, batch: NDArray[np.int32]) -> torch.Tensor:
    """Mean cross-entropy in nats of predicting batch[:, 1:], [B, T + 1]."""
    ids = torch.from_numpy(batch).long()
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(ids[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def learning_rate_factor(progress: float) -> float:
    """Warm-up over the first 2 %, then a cosine down to zero. progress is 0 to 1."""
    return min(1.0, progress / 0.02 + 0.01) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def make_optimizers(network: Network, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in network.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in network.named_parameters() if p.ndim != 2 or ".layers." not in name]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(network: Network, documents: list[NDArray[np.int32]], options: TrainingOptions) -> int:
    """Train in place up to the limit of steps or minutes, whichever comes first. Return the number of steps."""
    rng = np.random.default_rng(options.seed)
    optimizers = make_optimizers(network, options.learning_rate)
    sources = {length: windows(documents, length, rng) for length in (SHORT_WINDOW, LONG_WINDOW)}
    started, step, smoothed = time.monotonic(), 0, 0.0
    while True:
        progress = max(step / options.steps, (time.monotonic() - started) / (60 * options.minutes))
        if progress >= 1:
            return step
        length = LONG_WINDOW if step % LONG_EVERY == 0 else SHORT_WINDOW
        batch = np.stack([next(sources[length]) for _ in range(options.batch_tokens // length)])
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * learning_rate_factor(progress)
        loss = batch_loss(network, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        smoothed = loss.item() if step == 0 else 0.95 * smoothed + 0.05 * loss.item()
        step += 1
        if step % 20 == 0:
            speed = step * options.batch_tokens / (time.monotonic() - started)
            print(f"{100 * progress:5.1f} %  step {step}  loss {smoothed:.3f}  {speed:.0f} tokens/s", flush=True)


@torch.inference_mode()
def held_out_loss(network: Network, corpus: Corpus, tokenizer: Tokenizer) -> tuple[float, float]:
    """Return (nats per token, bits per character) on the reference pages of the held-out modules."""
    documents = [np.array(encoding.ids, np.int64) for encoding in tokenizer.encode_batch_fast(corpus.held_out_texts)]
    total, num_tokens = 0.0, 0
    for document in documents:
        ids = torch.from_numpy(document)[: network.dims.max_positions]
        total += functional.cross_entropy(network(ids[None, :-1])[0], ids[1:], reduction="sum").item()
        num_tokens += len(ids) - 1
    return total / num_tokens, total / math.log(2) / sum(map(len, corpus.held_out_texts))


def write_checkpoint(network: Network, tokenizer: Tokenizer, out: Path) -> None:
    """Write all files of the checkpoint except the chat template."""
    dims, specials = network.dims, SPECIAL_TOKENS
    files: dict[str, dict[str, Any]] = {
        "config.json": hf_config(dims, BOS_ID, [BOS_ID, END_ID]),
        "generation_config.json": {
            "bos_token_id": BOS_ID,
            "eos_token_id": [BOS_ID, END_ID],
            "pad_token_id": BOS_ID,
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.9,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": specials[BOS_ID],
            "eos_token": specials[END_ID],
            "pad_token": specials[BOS_ID],
            "add_bos_token": True,
            "add_eos_token": False,
            "model_max_length": dims.max_positions,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def main(options: TrainingOptions = TrainingOptions()) -> None:
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    corpus = build_corpus(options.seed)
    tokenizer = train_tokenizer(corpus, options.vocab_size)
    documents = encode_documents(corpus, tokenizer, (options.out / "chat_template.jinja").read_text(encoding="utf-8"))
    network = Network(
        Dimensions(
            vocab_size=tokenizer.get_vocab_size(),
            hidden=options.hidden,
            layers=options.layers,
            heads=options.hidden // 64,
            kv_heads=max(1, options.hidden // 128),
            intermediate=options.intermediate,
            max_positions=LONG_WINDOW,
        )
    )
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    num_tokens = sum(map(len, documents))
    print(f"{len(documents)} documents, {num_tokens} tokens; {num_parameters} parameters", flush=True)
    steps = train(network, documents, options)
    network.to(torch.bfloat16).to(torch.float32)
    loss, bits = held_out_loss(network, corpus, tokenizer)
    epochs = steps * options.batch_tokens / num_tokens
    print(f"{steps} steps, {epochs:.2f} epochs; held out: {loss:.4f} nats per token, {bits:.4f} bits per character")
    write_checkpoint(network, tokenizer, options.out)
    print(f"wrote {options.out}: {sum(file.stat().st_size for file in options.out.iterdir())} bytes")


if __name__ == "__main__":
    cyclopts.run(main)
