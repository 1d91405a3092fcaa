"""Finds tensors that a model has no place for: left out, such as a bias, they would change its results in silence."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.config.tensors import EMBEDDING, LM_HEAD
from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.formats.tensor_file import READABLE_DTYPES, StoredTensor, TensorFile
from penstock.backend.errors import StartupError

_BUFFERS = frozenset(
    {
        # computed from config.json
        *("inv_freq", "original_inv_freq", "cos_cached", "sin_cached", "position_ids", "masked_bias", "_extra_state"),
        # scales of activations and of the KV cache, which are computed or kept as usual
        *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "activation_scale"),
        *("q_scale", "k_scale", "v_scale", "kv_scale", "prob_output_scale", "k_zero_point", "v_zero_point"),
    }
)
"""Last components of the names of tensors that change no result."""
_OTHER_PARTS = frozenset(
    {
        # layers that predict further tokens, and heads that score
        *("mtp", "mtp_layers", "mtp_block", "mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj", "v_head"),
        # the rest of models that also read images or hear
        *("vision_tower", "vision_model", "vision_encoder", "visual", "multi_modal_projector", "mm_projector"),
        *("vision_language_adapter", "patch_merger", "image_newline", "embed_vision", "embed_audio"),
        *("audio_tower", "connector"),
    }
)
"""Components of the names, the first or the second, of parts that a decoder is computed without."""
_ENCODER_HEADS = frozenset(
    {
        *("pooler", "cls", "lm_head", "classifier", "pre_classifier", "score", "qa_outputs", "head", "decoder"),
        *("vocab_transform", "vocab_layer_norm", "vocab_projector", "mask_predictions", "lm_predictions"),
        *("sparse_linear", "colbert_linear", "linear"),
    }
)
"""Heads of encoders: a checkpoint may have others than the one that is used."""
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
_KEYS_AND_VALUES = ("self_attn.k_", "self_attn.v_")
_ZERO_ENDS = (".bias", "zero_point")
_MAX_ZEROS_BYTES = 1 << 24
_COMPARED_ROWS = 16


def refuse_unplaced(
    files: Iterable[TensorFile], placed: Collection[str], is_harmless: Callable[[str], bool], model: str
) -> None:
    """Raises StartupError for a tensor that is neither placed nor harmless. Biases of zeros are harmless as well.

    Only the content of tensors that would be refused is read.
    """
    for file in dict.fromkeys(files):
        for name, stored in file.tensors.items():
            if name in placed or is_buffer(name):
                continue
            # Another tensor of a module that is used, such as its bias, is never harmless by the module's name.
            is_beside = f"{name.rpartition('.')[0]}.weight" in placed
            if (is_beside or not is_harmless(name)) and not _is_zero(file, name, stored):
                raise StartupError(f"{file.path}: {describe_unplaced(name, model)}")


def describe_unplaced(name: str, model: str) -> str:
    return f"tensor {shorten(name)} has no place in {model} of this config.json; left out, it could change the results"


def unused_heads(config: DecoderConfig) -> Collection[str]:
    """The heads that a checkpoint may have without a place in the decoder."""
    return () if config.has_own_lm_head else (LM_HEAD,) if config.has_lm_head else (LM_HEAD, "score.weight")


def is_beside_decoder(num_layers: int, heads: Collection[str], name: str, num_shared: int = 0) -> bool:
    """Whether the tensor belongs to a part that the decoder is computed without, such as a layer after its last.

    The last num_shared layers use keys and values of others: some files have unused ones for them.
    """
    layer = _LAYER.match(name)
    if layer is not None:
        first_without = num_layers - num_shared if name[layer.end() :].startswith(_KEYS_AND_VALUES) else num_layers
        return int(layer[1]) >= first_without
    return name in heads or not _OTHER_PARTS.isdisjoint(name.split(".", 2)[:2])


def is_buffer(name: str) -> bool:
    """Whether the tensor changes no result, by the last component of its name."""
    return name.rpartition(".")[2] in _BUFFERS


def is_beside_encoder(prefix: str, layer: str, num_layers: int, name: str) -> bool:
    """As `is_beside_decoder`. prefix begins the names of the encoder's own tensors, and then layer, with {} for its
    number, those of a layer."""
    own = name.removeprefix(prefix)
    start, _, end = layer.partition("{}")
    number = own.removeprefix(start).partition(end)[0] if own.startswith(start) else ""
    if number.isdigit():
        return int(number) >= num_layers
    return own.partition(".")[0] in _ENCODER_HEADS or name.partition(".")[0] in _ENCODER_HEADS


def check_tied_head(files: Mapping[str, TensorFile]) -> None:
    """Raises StartupError if a head that config.json ties to the embedding is another matrix. Compares some rows."""
    if EMBEDDING not in files or LM_HEAD not in files:
        return
    (file, own), (other_file, other) = ((files[name], files[name].tensors[name]) for name in (LM_HEAD, EMBEDDING))
    rows = {own.shape[0] * i // _COMPARED_ROWS for i in range(_COMPARED_ROWS)} if own.shape == other.shape else set()
    if (
        own.dtype != other.dtype
        or not rows
        or any(
            not file.read(own.rows(row, 1), _ignore).equal(other_file.read(other.rows(row, 1), _ignore)) for row in rows
        )
    ):
        raise StartupError(
            f"{file.path}: tensor {LM_HEAD} is another matrix than {EMBEDDING}, to which tie_word_embeddings in "
            "config.json ties it: set tie_word_embeddings to false, or remove the tensor"
        )


def _is_zero(file: TensorFile, name: str, stored: StoredTensor) -> bool:
    if not name.endswith(_ZERO_ENDS) or stored.dtype not in READABLE_DTYPES or stored.num_bytes > _MAX_ZEROS_BYTES:
        return False
    return not bool(file.read(stored, _ignore).any())


def _ignore(_: int) -> None:
    """Not loading: the bytes count towards no progress."""
