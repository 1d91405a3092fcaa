"""Checks a model's tokenizer and chat template before its weights are loaded."""

from __future__ import annotations

from pathlib import Path


def why_unusable(model_dir: Path, template_file: Path | None) -> str | None:
    """Return why a frontend could not serve the model in a directory; None if it could."""
    # Imported here: the models of this package are not checked, and a start with them would import it for nothing.
    from penstock.frontend.text.tokenizer import ModelTokenizer
    from penstock.process.native_libraries import panics_unseen

    try:
        with panics_unseen():
            ModelTokenizer.load(model_dir, template_file)
    except Exception as error:  # noqa: BLE001 - a damaged file can raise anything
        return f"the tokenizer of the model {model_dir} cannot be used: {' '.join(str(error).split())}"
    return None
