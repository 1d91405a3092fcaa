"""How byte-level BPE splits text before it merges: a table of the names that GGUF files give.

The expressions are those of the models' own tokenizer.json, which llama.cpp approximates in places. Each one splits the
pieces that the one before left; what it does not match is a piece too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """Expressions that split text, in their order."""

    expressions: tuple[str, ...]
    composes: bool = False
    """Text is normalised to NFC first."""
    whole_words: bool = False
    """A word that is a token is not built by merges."""
    adds_bos: bool = False
    """Applies if the metadata do not say whether texts begin with bos."""
    separator: str | None = None
    """Ends texts of an encoder if the metadata do not say otherwise; the usual text of the token."""


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
_NOT_HAN = r"[^\r\n\p{L}\p{N}]?" + _UPPER.replace("]", r"&&[^\p{Han}]]")
_KIMI = (
    r"\p{Han}+|"
    + "|".join(
        _NOT_HAN + first + _LOWER.replace("]", r"&&[^\p{Han}]]") + last + _CONTRACTIONS + "?"
        for first, last in (("*", "+"), ("+", "*"))
    )
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    + _SPACES
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _SPACES
)
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼ"
    "ιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲"
    "𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters with case, as DeepSeek's tokenizer lists them."""
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
_PUNCTUATION = r"[\p{P}$+<=>^~|]+"
_NO_SENTENCE_MARKS = r" ?[^(\s|.,!?…。，、।۔،)]+"

_AS_GPT2 = Split((_GPT2,))
_BY_DIGITS = Split((r"\p{N}", _GPT2))
_AS_LLAMA3 = Split((_LLAMA3,), whole_words=True, adds_bos=True)
_AS_QWEN2 = Split((_QWEN2,))
_AS_QWEN = Split((_QWEN2,), composes=True)
_AS_GLM4 = Split((_LLAMA3,), whole_words=True)
_AS_GPT4O = Split((_GPT4O,))
_AS_BLOOM = Split((_NO_SENTENCE_MARKS,))
_AS_DEEPSEEK3 = Split((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))
_BY_THREE_DIGITS = Split((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))

SPLITS = {
    "default": Split((_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion", "granite-docling"),
        _AS_GPT2,
    ),
    **dict.fromkeys(("roberta-bpe", "jina-v1-en", "jina-v2-code"), Split((_GPT2,), adds_bos=True, separator="</s>")),
    "olmo": Split((_GPT2,), composes=True),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
        _BY_DIGITS,
    ),
    "command-r": Split((r"\p{N}", _GPT2), composes=True),
    "falcon": Split((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _AS_LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Split((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), _AS_GLM4),
    "minicpm5": Split((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), whole_words=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2"), _AS_QWEN),
    **dict.fromkeys(("stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"), _AS_QWEN2),
    "qwen35": Split((_QWEN35,), composes=True),
    "ufakzeka": Split((_QWEN2.removeprefix(_CONTRACTIONS + "|"),)),
    "seed-coder": Split((_QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),)),
    "tekken": Split((_TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _AS_GPT4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _BY_THREE_DIGITS),
    "kimi-k2": Split((_KIMI,), whole_words=True),
    "deepseek-llm": Split(_DEEPSEEK_LLM),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _AS_DEEPSEEK3),
    "superbpe": Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _AS_BLOOM),
    "viking": Split((_NO_SENTENCE_MARKS, r"\p{N}")),
}
"""By the value of tokenizer.ggml.pre."""
