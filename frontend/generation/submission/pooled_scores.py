"""Scores from the logits of a classifier or reranker, or from two vectors, in double precision."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from penstock.frontend.text.pooling_files import Activation


def activated(logits: Sequence[float], activation: Activation) -> list[float]:
    if activation == "sigmoid":
        return [sigmoid(logit) for logit in logits]
    if activation == "softmax":
        highest = max(logits)
        parts = [math.exp(logit - highest) for logit in logits]
        total = math.fsum(parts)
        return [part / total for part in parts]
    return list(logits)


def sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    part = math.exp(logit)
    return part / (1 + part)


def cosine(first: array[float], second: array[float]) -> float:
    """Return the product of two vectors of length 1, in double precision; rounding never makes it more than 1."""
    import numpy

    one, other = (numpy.frombuffer(values, dtype=numpy.float32).astype(numpy.float64) for values in (first, second))
    return max(-1.0, min(1.0, float(one @ other)))


def ranked(scores: Sequence[float], top_n: int | None = None) -> list[int]:
    """Return the indices of the top_n highest scores, best first; all of them for None or 0.

    Among equal scores the earlier one comes first.
    """
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return order[:top_n] if top_n else order
