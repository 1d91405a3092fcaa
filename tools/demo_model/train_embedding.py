"""Train the demo embedding model and write its checkpoint: `python -m penstock.tools.demo_model.train_embedding`.

A small BERT with mean pooling, trained by contrast (InfoNCE, arXiv 1807.03748) on questions and pages of the running
Python installation's documentation (see `pairs`), so that it needs no data but Python. Vectors are trained at several
lengths at once (Matryoshka, arXiv 2205.13147). It needs the package transformers.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, trainers
from torch.nn import functional
from transformers import BertConfig, BertModel

from penstock.tools.demo_model.pairs import Page, Pages, make_pair, read_pages
from penstock.tools.random_model import BERT_TOKENS, sentence_transformers_files, word_piece_tokenizer

MODEL_DIR = Path(__file__).parents[2] / "backend" / "demo_embedding_model"
MAX_TOKENS = 256
_QUESTION_TOKENS, _PAGE_TOKENS = 24, 48
"""Training cuts texts at these lengths. Some texts are shifted, to train the positions behind them."""
_TEMPERATURE = 0.05
_SAME_MODULE_PART = 0.5
"""This part of a batch comes from few modules: their pages are harder to tell apart."""


@cyclopts.Parameter(name="*")
@dataclass(frozen=True, slots=True)
class TrainingOptions:
    out: Path = MODEL_DIR
    minutes: Annotated[float, cyclopts.Parameter(validator=cyclopts.validators.Number(gt=0))] = 20.0
    """Limit of the training time, in minutes."""
    steps: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gt=0))] = 1000
    """Limit of the training steps."""
    batch_pairs: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=2))] = 128
    learning_rate: Annotated[float, cyclopts.Parameter(validator=cyclopts.validators.Number(gt=0))] = 2e-3
    vocab_size: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=512))] = 6144
    hidden: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=64))] = 192
    layers: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=1))] = 3
    threads: Annotated[int, cyclopts.Parameter(validator=cyclopts.validators.Number(gte=1))] = 2
    seed: int = 0

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The lengths to which a vector may be cut."""
        return self.hidden, self.hidden // 2, self.hidden // 4


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = word_piece_tokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=list(BERT_TOKENS), show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def embed(
    network: BertModel, tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int, shift: int = 0
) -> torch.Tensor:
    """[texts, hidden] mean of the last hidden states; shift moves the positions of the tokens."""
    tokenizer.enable_truncation(max_tokens)
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(texts))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = torch.tensor([encoding.ids for encoding in encodings])
    mask = torch.tensor([encoding.attention_mask for encoding in encodings])
    positions = torch.arange(shift, shift + ids.shape[1])[None]
    states = network(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
    weights = mask[..., None].to(states.dtype)
    mean: torch.Tensor = (states * weights).sum(1) / weights.sum(1)
    return mean


def contrastive_loss(questions: torch.Tensor, pages: torch.Tensor, dimensions: Sequence[int]) -> torch.Tensor:
    """Mean over dimensions and both directions of the cross-entropy of finding each question's page in the batch."""
    targets = torch.arange(len(questions))
    losses = []
    for size in dimensions:
        left = functional.normalize(questions[:, :size].float(), dim=1)
        right = functional.normalize(pages[:, :size].float(), dim=1)
        scores = left @ right.T / _TEMPERATURE
        losses += [functional.cross_entropy(scores, targets), functional.cross_entropy(scores.T, targets)]
    return torch.stack(losses).mean()


class PairBatches:
    """Batches of pairs of different pages."""

    def __init__(self, pages: list[Page], num_pairs: int, rng: random.Random) -> None:
        self._pages = pages
        self._by_module: dict[str, list[Page]] = {}
        for page in pages:
            self._by_module.setdefault(page.module, []).append(page)
        self._modules = list(self._by_module)
        self._num_pairs = num_pairs
        self._rng = rng

    def next(self) -> tuple[list[str], list[str]]:
        chosen: dict[str, Page] = {}
        while len(chosen) < self._num_pairs * _SAME_MODULE_PART:
            siblings = self._by_module[self._rng.choice(self._modules)]
            for page in self._rng.sample(siblings, min(24, len(siblings))):
                chosen[page.name] = page
        while len(chosen) < self._num_pairs:
            page = self._rng.choice(self._pages)
            chosen[page.name] = page
        pairs = [make_pair(page, self._rng) for page in chosen.values()]
        return [question for question, _ in pairs], [text for _, text in pairs]


def learning_rate_factor(progress: float) -> float:
    """Warm-up over the first 5 %, then a cosine down to zero. progress is 0 to 1."""
    return min(1.0, progress / 0.05 + 0.01) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def train(network: BertModel, tokenizer: Tokenizer, pages: list[Page], options: TrainingOptions) -> int:
    """Train in place up to the limit of steps or minutes, whichever comes first. Return the number of steps."""
    rng = random.Random(options.seed)  # noqa: S311
    batches = PairBatches(pages, options.batch_pairs, rng)
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.learning_rate, weight_decay=0.05)
    started, step, smoothed = time.monotonic(), 0, 0.0
    network.train()
    while True:
        progress = max(step / options.steps, (time.monotonic() - started) / (60 * options.minutes))
        if progress >= 1:
            return step
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * learning_rate_factor(progress)
        questions, texts = batches.next()
        shift = rng.choice((0, 0, 0, rng.randrange(MAX_TOKENS - _PAGE_TOKENS)))
        with torch.autocast("cpu", torch.bfloat16):
            left = embed(network, tokenizer, questions, _QUESTION_TOKENS)
            right = embed(network, tokenizer, texts, _PAGE_TOKENS, shift)
        loss = contrastive_loss(left, right, options.dimensions)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        smoothed = loss.item() if step == 0 else 0.95 * smoothed + 0.05 * loss.item()
        step += 1
        if step % 20 == 0:
            seconds = (time.monotonic() - started) / step
            print(f"{100 * progress:5.1f} %  step {step}  loss {smoothed:.3f}  {seconds:.2f} s/step", flush=True)


@torch.inference_mode()
def recall(
    network: BertModel, tokenizer: Tokenizer, questions: Sequence[str], pages: Sequence[str], size: int, first: int = 10
) -> float:
    """The part of the questions whose page, pages[i] for question i, is among the first by cosine of size values."""
    network.train(mode=False)
    left, right = (_vectors(network, tokenizer, texts, size) for texts in (questions, pages))
    scores = left @ right.T
    own = scores[torch.arange(len(questions)), torch.arange(len(questions))]
    ranks = (scores > own[:, None]).sum(1)
    return float((ranks < first).float().mean())


def _vectors(network: BertModel, tokenizer: Tokenizer, texts: Sequence[str], size: int) -> torch.Tensor:
    parts = [embed(network, tokenizer, texts[i : i + 64], MAX_TOKENS) for i in range(0, len(texts), 64)]
    return functional.normalize(torch.cat(parts)[:, :size].float(), dim=1)


def held_out_recall(network: BertModel, tokenizer: Tokenizer, pages: Pages, size: int) -> tuple[float, float]:
    """Recall@10 of held-out summaries: finding the page without its summary among the held-out ones, and finding the
    whole page among all pages that have a docstring."""
    summaries = [page.summary for page in pages.held_out]
    alone = recall(network, tokenizer, summaries, [page.text_without_summary for page in pages.held_out], size)
    everything = [page.text for page in (*pages.held_out, *(page for page in pages.training if page.summary))]
    return alone, recall(network, tokenizer, summaries, everything, size)


def write_checkpoint(network: BertModel, tokenizer: Tokenizer, options: TrainingOptions) -> None:
    """Write the checkpoint in the layout of sentence-transformers."""
    files: dict[str, Any] = {
        "config.json": {**network.config.to_diff_dict(), "architectures": ["BertModel"], "dtype": "bfloat16"},
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine", "prompts": {}},
        **sentence_transformers_files(options.hidden, MAX_TOKENS),
    }
    for name, content in files.items():
        path = options.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(options.out / "tokenizer.json"), pretty=False)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
        if tensor.is_floating_point()
    }
    save_file(weights, options.out / "model.safetensors", metadata={"format": "pt"})


def main(options: TrainingOptions = TrainingOptions()) -> None:
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    pages = read_pages()
    tokenizer = train_tokenizer([page.text for page in pages.training], options.vocab_size)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        intermediate_size=4 * options.hidden,
        max_position_embeddings=MAX_TOKENS,
        hidden_dropout_prob=0.05,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )
    network = BertModel(config, add_pooling_layer=False)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    print(f"{len(pages.training)} pages, {len(pages.held_out)} held out; {num_parameters} parameters", flush=True)
    steps = train(network, tokenizer, pages.training, options)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    for size in options.dimensions:
        alone, among_all = held_out_recall(network, tokenizer, pages, size)
        print(f"{size} values: recall@10 {alone:.3f} among held-out pages without summary, {among_all:.3f} among all")
    write_checkpoint(network, tokenizer, options)
    size = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    print(f"{steps} steps; wrote {options.out}: {size} bytes")


if __name__ == "__main__":
    cyclopts.run(main)
