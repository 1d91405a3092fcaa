"""The models that come with this package, by the names that --model takes for them."""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL = "penstock-demo"
_BACKEND = Path(__file__).parents[1]
DEMO_MODEL_DIR = _BACKEND / "demo_model"
SHIPPED_MODELS = {
    DEMO_MODEL: DEMO_MODEL_DIR,
    "penstock-demo-embed": _BACKEND / "demo_embedding_model",
}
