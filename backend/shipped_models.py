"""The models that come with this package, by the names that --model takes for them."""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL = "penstock-demo"
DEMO_MODEL_DIR = Path(__file__).parent / "demo_model"
SHIPPED_MODELS = {
    DEMO_MODEL: DEMO_MODEL_DIR,
    "penstock-demo-embed": Path(__file__).parent / "demo_embedding_model",
}
