"""Names of encoders' tensors in Hugging Face checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

ANSWERS = ("yes", "no")
"""The words whose logits a decoder without a head of its own compares to rerank (arXiv 2506.05176)."""


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Names of tensors in a checkpoint, without .weight or .bias; those of a layer without its prefix."""

    prefixes: tuple[str, ...]
    """Possible prefixes of all of these names. The first with which the checkpoint has the table of words is used."""
    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    token_types: str = "embeddings.token_type_embeddings"  # noqa: S105 - not a password
    embedding_norm: str = "embeddings.LayerNorm"
    relative_bias: str = "encoder.relative_attention_bias"
    relative_positions: str = "encoder.rel_embeddings"
    relative_norm: str = "encoder.LayerNorm"
    layer: str = "encoder.layer.{}."
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    """q, k and v, or one tensor of all three."""
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    mlp_in: tuple[str, ...] = ("intermediate.dense",)
    """The MLP's first product. A gated MLP has two, gate and up, as two tensors or as one."""
    up_before_gate: bool = False
    """In one tensor of gate and up, the rows of up come first."""
    mlp_out: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str | None = None


NAMES = {
    "Bert": EncoderNames(prefixes=("", "bert.")),
    "DistilBert": EncoderNames(
        prefixes=("", "distilbert."),
        layer="transformer.layer.{}.",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        attention_norm="sa_layer_norm",
        mlp_in=("ffn.lin1",),
        mlp_out="ffn.lin2",
        mlp_norm="output_layer_norm",
    ),
    "Roberta": EncoderNames(prefixes=("", "roberta.")),
    "MPNet": EncoderNames(
        prefixes=("", "mpnet."),
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        output="attention.attn.o",
        attention_norm="attention.LayerNorm",
    ),
    "ModernBert": EncoderNames(
        prefixes=("", "model."),
        words="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        layer="layers.{}.",
        qkv=("attn.Wqkv",),
        output="attn.Wo",
        attention_norm="attn_norm",
        mlp_in=("mlp.Wi",),
        mlp_out="mlp.Wo",
        mlp_norm="mlp_norm",
        final_norm="final_norm",
    ),
    "NomicBert": EncoderNames(
        prefixes=("", "nomic_bert."),
        embedding_norm="emb_ln",
        layer="encoder.layers.{}.",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        attention_norm="norm1",
        mlp_in=("mlp.fc12", "mlp.fc11"),
        mlp_out="mlp.fc2",
        mlp_norm="norm2",
    ),
    "Gte": EncoderNames(
        prefixes=("", "new.", "gte."),
        qkv=("attention.qkv_proj",),
        output="attention.o_proj",
        attention_norm="attn_ln",
        mlp_in=("mlp.up_gate_proj",),
        up_before_gate=True,
        mlp_out="mlp.down_proj",
        mlp_norm="mlp_ln",
    ),
    "DebertaV2": EncoderNames(
        prefixes=("", "deberta."),
        qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
    ),
}
"""By the beginning of the architectures' names."""
