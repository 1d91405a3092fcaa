"""Write a cross-encoder: the demo embedding model with a random head of one score. Run by penstock's own Python."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import transformers

import penstock.backend


def main(out: Path) -> None:
    demo = Path(penstock.backend.__file__).parent / "demo_embedding_model"
    transformers.logging.set_verbosity_error()  # the head has no weights yet
    torch.manual_seed(7)
    model = transformers.BertForSequenceClassification.from_pretrained(demo, num_labels=1, dtype=torch.float32)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo / name, out / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
