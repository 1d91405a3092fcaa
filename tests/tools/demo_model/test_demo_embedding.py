"""The shipped demo embedding model: its training pairs, its layout and its quality."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

from penstock.tools.demo_model.corpus import HELD_OUT
from penstock.tools.demo_model.pairs import Page, Pages, make_pair, name_words, read_pages
from penstock.tools.demo_model.train_embedding import (
    MAX_TOKENS,
    MODEL_DIR,
    TrainingOptions,
    embed,
    recall,
    train,
    train_tokenizer,
    write_checkpoint,
)

MAX_BYTES = 6_000_000


@pytest.fixture(scope="module")
def pages() -> Pages:
    return read_pages()


@pytest.fixture(scope="module")
def network() -> BertModel:
    model: BertModel = BertModel.from_pretrained(MODEL_DIR, dtype=torch.float32, add_pooling_layer=False)
    return model.train(mode=False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in MODEL_DIR.rglob("*") if path.is_file()) <= MAX_BYTES


def test_no_training_page_is_of_a_held_out_module(pages: Pages) -> None:
    assert {page.module.split(".")[0] for page in pages.held_out} <= HELD_OUT
    assert not {page.module.split(".")[0] for page in pages.training} & HELD_OUT


def test_the_name_of_a_page_is_read_as_words() -> None:
    assert name_words("collections.OrderedDict.move_to_end") == "collections ordered dict move to end"


def test_questions_and_texts_come_from_their_page() -> None:
    page = Page("heapq", "heapq.heappush", "(heap, item)", "Push item onto heap", "The heap invariant is kept.")
    rng = random.Random(1)
    pairs = {make_pair(page, rng) for _ in range(200)}
    assert ("how to push item onto heap", page.text) in pairs
    assert all(text for question, text in pairs if question)
    words = set(f"{page.text} {name_words(page.name)}".lower().split())
    templates = {"how", "to", "do", "i", "function", "which", "can", "python", "want", "what", "is", "used", "push"}
    assert {word.strip("?") for question, _ in pairs for word in question.lower().split()} <= words | templates


def test_held_out_pages_are_found(network: BertModel, tokenizer: Tokenizer, pages: Pages) -> None:
    """docs/demo-model.md has the figures, also those among all pages. The margin is for other versions of Python."""
    some = pages.held_out[::4]
    questions = [page.summary for page in some]
    assert recall(network, tokenizer, questions, [page.text_without_summary for page in some], 192) > 0.5
    assert recall(network, tokenizer, questions, [page.text for page in some], 48) > 0.85


QUESTIONS = {
    "os.path.join": "how do I join two paths?",
    "heapq.heappush": "put an item on a heap",
    "shutil.copyfile": "copy a file",
    "math.log": "natural logarithm",
}


def test_a_function_is_found_by_a_question(network: BertModel, tokenizer: Tokenizer, pages: Pages) -> None:
    by_name = {page.name: page.text for page in reversed((*pages.training, *pages.held_out)) if page.summary}
    own = [by_name.pop(name) for name in QUESTIONS]
    texts = [*own, *random.Random(0).sample(sorted(by_name.values()), 100)]
    vectors = embed(network, tokenizer, [*QUESTIONS.values(), *texts], MAX_TOKENS)
    questions, vectors = vectors[: len(own)], vectors[len(own) :]
    scores = torch.nn.functional.cosine_similarity(questions[:, None], vectors[None], dim=-1)
    num_nearer = (scores > scores.diagonal()[:, None]).sum(dim=1)
    assert (num_nearer < 5).all(), dict(zip(QUESTIONS, num_nearer.tolist(), strict=True))


def test_training_finds_pages_that_an_untrained_model_does_not(pages: Pages, tmp_path: Path) -> None:
    chosen = [page for page in pages.training if page.module in ("math", "os.path")]
    options = TrainingOptions(out=tmp_path, steps=30, batch_pairs=24, hidden=64, layers=1, vocab_size=700, seed=3)
    tokenizer = train_tokenizer([page.text for page in chosen], options.vocab_size)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=MAX_TOKENS, pad_token_id=0,
    )  # fmt: skip
    network = BertModel(config, add_pooling_layer=False)
    questions, texts = [page.summary for page in chosen], [page.text for page in chosen]
    with torch.inference_mode():
        before = recall(network, tokenizer, questions, texts, 64, first=1)
    assert train(network, tokenizer, chosen, options) == 30
    assert recall(network, tokenizer, questions, texts, 64, first=1) > before + 0.1
    write_checkpoint(network, tokenizer, options)
    stored = BertModel.from_pretrained(tmp_path, dtype=torch.float32, add_pooling_layer=False)
    assert recall(stored, tokenizer, questions, texts, 64, first=1) > before + 0.1
    assert json.loads((tmp_path / "1_Pooling" / "config.json").read_text())["pooling_mode_mean_tokens"] is True
