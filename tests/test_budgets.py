"""Budgets: lines of Python a package, words of docs, modules a package. Raising one is a reviewed line here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
WINGS = ("penstock", "frontend", "backend", "shm", "tools")
MAX_PRODUCT_LINES = 99_850
MAX_LABORATORY_LINES = 19_660
MAX_DOC_WORDS = 78_730
MIN_ENTRIES, MAX_MODULES = 4, 12

MAX_LINES = {
    "backend": 1_140,
    "backend/checkpoint": 13_698,
    "backend/engine": 5_480,
    "backend/forward_pass": 910,
    "backend/kv_cache": 2_720,
    "backend/passes": 20_290,
    "backend/sampling": 840,
    "backend/scheduling": 2_160,
    "backend/sequences": 1_000,
    "backend/start": 1_220,
    "backend/structured_output": 2_300,
    "frontend": 1_320,
    "frontend/access": 860,
    "frontend/endpoints": 8_749,
    "frontend/formats": 1_390,
    "frontend/generation": 3_620,
    "frontend/parsing": 3_410,
    "frontend/pictures": 1_010,
    "frontend/schemas": 3_410,
    "frontend/telemetry": 700,
    "frontend/text": 2_110,
    "frontend/transport": 2_470,
    "penstock": 230,
    "penstock/commands": 3_190,
    "penstock/process": 1_790,
    "penstock/serve": 3_600,
    "shm": 10,
    "shm/buffers": 1_370,
    "shm/client": 3_540,
    "shm/link": 1_770,
    "shm/memory": 1_370,
    "shm/messages": 1_150,
    "shm/recording": 1_220,
    "tools": 1_300,
    "tools/bench": 4_750,
    "tools/chaos": 3_380,
    "tools/demo_model": 1_460,
    "tools/forward_pass_contract": 990,
    "tools/gpu": 6_860,
    "tools/replay": 960,
}
"""Lines of Python of each package, with those below it."""

WIDE_PACKAGES = {"penstock/process": "children that exchange messages are apart, because others need no msgspec"}
"""Packages of more than MAX_MODULES modules, and why."""

SMALL_PACKAGES = {
    "backend/checkpoint/sources": "one capability",
    "penstock/commands/inspect_model": "one capability",
    "penstock/commands/models": "one capability",
    "penstock/commands/recorder": "one capability",
    "penstock/commands/top": "one capability",
}
"""Packages of MIN_ENTRIES - 1 modules and packages, and why."""


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
    """As `wc -w` counts them: whatever stands between spaces, the bars of tables too."""
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").rglob("*.md"))
    assert 0 < words <= MAX_DOC_WORDS


def test_packages_have_four_to_twelve_modules() -> None:
    """Packages count as entries of the one that they are in."""
    num_modules: Counter[str] = Counter()
    num_entries: Counter[str] = Counter()
    for path in (path for wing in WINGS for path in modules(wing)):
        is_package = path.name == "__init__.py"
        num_modules[str(path.parent)] += not is_package
        num_entries[str(path.parent.parent if is_package else path.parent)] += 1
    assert {package for package, num in num_modules.items() if num > MAX_MODULES} == set(WIDE_PACKAGES)
    small = {package: num for package in num_modules if (num := num_entries[package]) < MIN_ENTRIES}
    assert small == dict.fromkeys(SMALL_PACKAGES, MIN_ENTRIES - 1)
