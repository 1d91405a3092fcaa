"""The one list of everything that gpu-check can run, by name, with its seconds on an H100. Imports no torch.

The list's order is that of a run without `--first`. Its sizes are the 8B model's, unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from penstock.backend.passes.cuda.device.kernel_choices import ALLOWED

_ROOT = "penstock.tools.gpu"


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a run. The module has a function `run(results, item)`."""

    name: str
    seconds: float
    """The time it is expected to take; see `limit_s`."""
    module: str
    arguments: tuple[Any, ...] = ()
    is_beside: bool = False
    """Uses mostly CPUs: it has a process of its own and runs beside its neighbours that are so too."""
    settings: tuple[tuple[str, int], ...] = ()
    """Settings of the GPU's record to measure: cases of kernels beside the adopted ones, models instead of them."""

    @property
    def limit_s(self) -> float:
        """It is ended after so long. The first one of a process imports torch, opens the device and loads kernels."""
        return SLACK_S + 3 * self.seconds


SLACK_S = 20.0
_START_S = 8.0
"""Of a process, until it has imported torch and opened the device."""


class UnknownName(ValueError):
    """A name that the list does not have, or a setting that no record may have; the message says what exists."""


def choose(names: Iterable[str], items: Sequence[Item] | None = None) -> list[Item]:
    """Return the items of each name in turn: the one of this name, or else those that begin with it and a dot.

    `NAME+SETTING=VALUE` gives them settings. Raises UnknownName.
    """
    items, found = (*ITEMS, CUBINS) if items is None else items, {}
    for name in names:
        base, *given = name.split("+")
        settings = tuple(map(_setting, given))
        chosen = [item for item in items if item.name == base]
        chosen = chosen or [item for item in items if item.name.startswith(f"{base}.")]
        if not chosen:
            groups = ", ".join(dict.fromkeys(item.name.partition(".")[0] for item in items))
            raise UnknownName(f"{base} is no name of the list; names begin with {groups}")
        for item in chosen:
            if settings and item.module not in (_KERNELS, _MODELS):
                raise UnknownName(f"{name}: {item.name} is not measured with settings")
            full = "+".join([item.name, *given])
            seconds = item.seconds * (2 if settings and item.module == _KERNELS else 1)
            found[full] = replace(item, name=full, seconds=seconds, settings=settings)
    return list(found.values())


def order(first: Iterable[str], *, has_others: bool) -> list[Item]:
    """Return the named items and, with has_others or without names, the rest of the list. Raises UnknownName."""
    named = choose(first)
    names = {item.name for item in named}
    return [*named, *(item for item in ITEMS if item.name not in names)] if has_others or not named else named


def wall_seconds(chosen: Iterable[Item]) -> float:
    """Return the seconds that a run takes: the longest counts of those that run beside each other."""
    total_s = 0.0
    for is_beside, members in groupby(chosen, lambda item: item.is_beside):
        seconds = [item.seconds for item in members]
        total_s += _START_S + (max(seconds) if is_beside else sum(seconds))
    return total_s


def _setting(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if name not in ALLOWED:
        raise UnknownName(f"+{text}: {name} is no setting; there are {', '.join(ALLOWED)}")
    allowed = {str(each): each for each in ALLOWED[name]}
    if value not in allowed:
        raise UnknownName(f"+{text}: {name} must be one of {', '.join(allowed)}")
    return name, allowed[value]


_CHECKS = f"{_ROOT}.checks"
_KERNELS, _MODELS = f"{_ROOT}.speed.kernels", f"{_ROOT}.speed.models"
_CORRECTNESS = {
    "wgmma": (("wgmma",), 8),
    "decode": (("decode",), 20),
    "prefill": (("prefill",), 20),
    "settings": (("choices",), 10),
    "heads": (("encoder", "delta_net", "wide"), 15),
    "rows": (("rows", "adapters"), 12),
    "quantised": (("quantised", "rounded"), 40),
    "experts": (("experts",), 25),
    "sampling": (("sampling",), 15),
    "library": (("library",), 20),
    "elementwise": (("ptx", "norm", "embed", "gate", "gather", "streams", "rope_and_store", "copy_pages"), 15),
}  # fmt: skip
"""Families of kernels' checks, which the CPU compares with float64."""


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _kernel_items() -> Iterator[Item]:
    """Arguments: the preparing function of `kernel_cases` or `product_cases`, and its arguments."""

    def item(name: str, kind: str, *arguments: Any, seconds: float = 0.4) -> Item:
        return Item(name, seconds, _KERNELS, (kind, *arguments))

    for rows, tokens, kv_dtype in (
        (64, 1024, "bf16"), (8, 4096, "bf16"), (1, 1024, "bf16"), (256, 1024, "bf16"), (64, 8192, "bf16"),
        (8, 1024, "bf16"), (1, 32768, "bf16"), (64, 1024, "q8_0"), (64, 1024, "fp8"), (64, 8192, "q8_0"),
        (64, 1024, "fp32"),
    ):  # fmt: skip
        of_cache = "" if kv_dtype == "bf16" else f".{kv_dtype}"
        yield item(f"attention.decode.{rows}x{short(tokens)}{of_cache}", "decode", rows, tokens, kv_dtype)
    for name, history, tokens, kv_dtype in (
        ("4k", 0, 4096, "bf16"), ("8k", 0, 8192, "bf16"), ("1k", 0, 1024, "bf16"), ("1k_after_8k", 8192, 1024, "bf16"),
        ("4k.q8_0", 0, 4096, "q8_0"), ("4k.fp8", 0, 4096, "fp8"),
    ):  # fmt: skip
        yield item(f"attention.prefill.{name}", "prefill", history, tokens, kv_dtype)
    for rows, tokens, window in ((128, 128, None), (32, 512, None), (2, 8192, None), (2, 8192, 64)):
        name = f"attention.encoder.{rows}x{short(tokens)}{'' if window is None else '.local'}"
        yield item(name, "encoder", rows, tokens, window)
    for weight in ("qkv", "o", "gate_up", "down", "lm_head"):
        for rows in (1, 4) if weight == "lm_head" else (1, 2, 4, 8, 16, 32):
            yield item(f"product.bf16.{weight}.{rows}", "fused", weight, rows)
    for form in ("int8", "fp8", "int4", "mxfp4", "q4_1", "q4_k", "fp8-128"):
        for rows in (1, 8, 16, 32, 64, 128, 256):
            yield item(f"product.{form}.{rows}", "quantised", form, rows, seconds=0.8)
    for weight in ("qkv", "o", "gate_up", "down", "lm_head"):
        for rows in (1, 4, 16, 32, 64, 128, 256, 512):
            yield item(f"product.library.{weight}.{rows}", "library", weight, rows)
    for tokens in (1, 64, 512, 2048):
        yield item(f"experts.{tokens}", "experts", tokens, seconds=1.0)
    for kind in ("greedy", "plain", "top_p", "penalties", "filtered", "flat", "peaked"):
        yield item(f"sampling.256.{kind}", "sampling", kind)


def _all() -> Iterator[Item]:
    yield Item("environment", 2, f"{_ROOT}.environment")
    yield Item("ceilings", 8, f"{_ROOT}.speed.ceilings")
    yield Item("compile", 15, f"{_CHECKS}.compilation")
    for name, (families, seconds) in _CORRECTNESS.items():
        yield Item(f"correctness.{name}", seconds, f"{_CHECKS}.correctness", families, is_beside=True)
    for kind, seconds in {"families": 30, "variations": 35}.items():
        yield Item(f"correctness.pass.{kind}", seconds, f"{_CHECKS}.pass_agreement", (kind,), is_beside=True)
    yield Item("checkpoint", 30, f"{_CHECKS}.checkpoint", is_beside=True)
    yield from _kernel_items()
    models = {
        "llama8b": 35, "llama8b.fp8": 12, "llama8b.int8": 12, "llama8b.int4": 12, "llama8b.cache_fp8": 8,
        "llama8b.cache_q8_0": 8, "qwen06b": 10, "experts": 15, "deterministic": 10,
    }  # fmt: skip
    for plan, seconds in models.items():
        yield Item(f"model.{plan}", seconds, _MODELS, (plan,))
    for load, seconds in {"users": 20, "offline": 15}.items():
        yield Item(f"engine.{load}", seconds, f"{_ROOT}.speed.engine_runs", (load,))
    yield Item("invariance.kernels", 15, f"{_CHECKS}.invariance", ("kernels",), is_beside=True)
    for kind, seconds in {"products": 8, "passes": 20}.items():
        yield Item(f"invariance.{kind}", seconds, f"{_CHECKS}.invariance", (kind,))
    yield Item("sharing", 12, f"{_CHECKS}.sharing")


ITEMS: tuple[Item, ...] = tuple(_all())
CUBINS = Item("cubins", 900, f"{_CHECKS}.compilation", ("all",))
"""Compiles for every architecture. It needs no GPU, and runs only by its name."""
