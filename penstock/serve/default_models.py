"""The models that `penstock serve` takes where none is named: real ones, and without network the demo models."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

from penstock.backend.checkpoint.hub import fetch_small_files
from penstock.backend.errors import StartupError
from penstock.backend.model_names import (
    DEFAULT_EMBEDDING_MODELS,
    DEFAULT_MODEL,
    DEMO_EMBEDDING_MODEL,
    DEMO_MODEL,
)
from penstock.backend.options import BackendOptions
from penstock.serve.options import DEFAULT_EMBEDDING, ServeOptions

logger = logging.getLogger("penstock.serve")


def with_default_models(options: ServeOptions) -> ServeOptions:
    """Return the options with a model for each one that the operator leaves to us; it is downloaded if need be."""
    # Another pass, such as the fake one, has no use for these weights.
    is_ours = options.forward_pass == BackendOptions.forward_pass
    if options.model is None and not options.has_names and is_ours:
        options = dataclasses.replace(options, model=_first_that_comes([DEFAULT_MODEL], DEMO_MODEL))
    if options.embedding_model == DEFAULT_EMBEDDING:
        model = _first_that_comes(DEFAULT_EMBEDDING_MODELS, DEMO_EMBEDDING_MODEL)
        options = dataclasses.replace(options, embedding_model=model)
    return options


def _first_that_comes(names: Iterable[object], demo: str) -> str:
    reasons = []
    for name in map(str, names):
        try:
            fetch_small_files(name)
        except StartupError as error:
            reasons.append(str(error))
        else:
            return name
    logger.warning("%s; the small demo model %s is served instead", "; ".join(reasons), demo)
    return demo
