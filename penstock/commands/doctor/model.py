"""A model: whether its files are whole and served, and whether its weights fit into the memory."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.backend.errors import StartupError
from penstock.backend.kv_cache.budget.memory import MemoryInfo, host_memory
from penstock.commands.doctor.finding import Finding, Level
from penstock.commands.inspect_model.description import describe_named_model
from penstock.process.options import format_size


def examine_model(model: str, revision: str | None) -> Iterator[Finding]:
    """model is a directory, a GGUF file or a hub id, of which only small files are downloaded."""
    try:
        described = describe_named_model(model, revision)
    except StartupError as error:
        yield Finding(Level.ERROR, "model", str(error), "give --model a directory, a GGUF file or a hub id")
        return
    if described.not_served_because is not None:
        remedy = "penstock inspect describes it; docs/models.md lists what is served"
        yield Finding(Level.ERROR, "model", described.not_served_because, remedy)
        return
    kind = f"{described.architecture}, {described.quantization or 'not quantised'}"
    yield Finding(Level.OK, "model", f"{model}: {kind}, {described.parameters:,} parameters")
    yield fits(described.weight_bytes, host_memory())


def fits(weight_bytes: int, memory: MemoryInfo) -> Finding:
    text = f"{format_size(weight_bytes)} of weights; {format_size(memory.free_bytes)} are free on {memory.name}"
    if weight_bytes > memory.free_bytes:
        remedy = "take a smaller or a quantised model, or --quantize int8 or int4"
        return Finding(Level.WARNING, "model's size", text, remedy)
    return Finding(Level.OK, "model's size", text)
