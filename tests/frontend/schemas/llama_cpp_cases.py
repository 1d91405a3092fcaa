"""Parameters of llama.cpp's samplers, and what they change in the request that reaches the backend."""

from __future__ import annotations

from typing import Any

LLAMA_CPP_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"xtc_probability": 0.5}, {"xtc_probability": 0.5}),
    ({"xtc_probability": 1, "xtc_threshold": 0.2}, {"xtc_probability": 1.0, "xtc_threshold": 0.2}),
    ({"top_n_sigma": 1.5}, {"top_n_sigma": 1.5}),
    ({"dynatemp_range": 0.5, "dynatemp_exponent": 2}, {"dynatemp_range": 0.5, "dynatemp_exponent": 2.0}),
    (
        {"xtc_probability": 0, "xtc_threshold": 0.2, "top_n_sigma": -1, "dynatemp_exponent": 2, "dynatemp_range": 0}
        | {"dry_multiplier": 0.8, "dry_penalty_last_n": 0, "dry_base": 3, "dry_sequence_breakers": ["a"]},
        {},
    ),
    (
        {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 64}
        | {"dry_sequence_breakers": ["\u2603"]},  # of no token
        {"dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 64},
    ),
]
