"""Budgets: lines of Python a package, words of docs, modules a package. Raising one is a reviewed line here."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
WINGS = ("penstock", "frontend", "backend", "shm", "tools")
MAX_PRODUCT_LINES = 82_000
MAX_LABORATORY_LINES = 19_000
MAX_DOC_WORDS = 75_000
MAX_MODULES = 12

MAX_LINES = {
    "backend": 900,
    "backend/checkpoint": 11_690,
    "backend/engine": 4_010,
    "backend/forward_pass": 700,
    "backend/kv_cache": 1_910,
    "backend/passes": 15_720,
    "backend/sampling": 550,
    "backend/scheduling": 1_760,
    "backend/sequences": 620,
    "backend/start": 800,
    "backend/structured_output": 1_760,
    "frontend": 1_240,
    "frontend/access": 870,
    "frontend/endpoints": 7_240,
    "frontend/formats": 1_150,
    "frontend/generation": 3_480,
    "frontend/parsing": 2_520,
    "frontend/schemas": 2_950,
    "frontend/telemetry": 710,
    "frontend/text": 950,
    "frontend/transport": 2_360,
    "penstock": 190,
    "penstock/commands": 2_860,
    "penstock/process": 1_400,
    "penstock/serve": 3_320,
    "shm": 30,
    "shm/buffers": 1_410,
    "shm/client": 3_390,
    "shm/link": 1_770,
    "shm/memory": 1_340,
    "shm/messages": 1_040,
    "shm/recording": 1_170,
    "tools": 1010,
    "tools/bench": 4_650,
    "tools/chaos": 2_450,
    "tools/demo_model": 1_480,
    "tools/forward_pass_contract": 880,
    "tools/gpu": 7_310,
    "tools/replay": 1020,
    "tools/rig": 320,
}
"""Lines of Python of each package, with those below it."""

WIDE_PACKAGES = {}
"""Packages of more than MAX_MODULES modules, and why."""


def modules(wing: str) -> list[Path]:
    return [path.relative_to(ROOT) for path in (ROOT / wing).rglob("*.py")]


def num_lines(path: Path) -> int:
    return (ROOT / path).read_text(encoding="utf-8").count("\n")


def package_of(path: Path) -> str:
    """The wing and the folder below it; of a module in the wing itself the wing."""
    return "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]


def test_packages_keep_their_budget_of_lines() -> None:
    lines: Counter[str] = Counter()
    for wing in WINGS:
        for path in modules(wing):
            lines[package_of(path)] += num_lines(path)
    over = {package: num for package, num in lines.items() if num > MAX_LINES.get(package, 0)}
    assert over == {}
    laboratory = sum(num for package, num in lines.items() if package.startswith("tools"))
    assert laboratory <= MAX_LABORATORY_LINES
    assert lines.total() - laboratory <= MAX_PRODUCT_LINES
    assert set(MAX_LINES) == set(lines)  # no budget for a package that is gone


def test_docs_keep_their_budget_of_words() -> None:
    """A word has a letter or a digit."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    words = sum(bool(re.search(r"\w", token)) for page in pages for token in page.read_text(encoding="utf-8").split())
    assert 0 < words <= MAX_DOC_WORDS


def test_packages_have_at_most_a_dozen_modules_and_more_than_one() -> None:
    num_modules: Counter[str] = Counter()
    num_rooms: Counter[str] = Counter()
    for wing in WINGS:
        for path in modules(wing):
            if path.name == "__init__.py":
                num_rooms[str(path.parent.parent)] += 1
            else:
                num_modules[str(path.parent)] += 1
    wide = {package for package, num in num_modules.items() if num > MAX_MODULES}
    assert wide == set(WIDE_PACKAGES)
    assert [package for package, num in num_modules.items() if num + num_rooms[package] == 1] == []
