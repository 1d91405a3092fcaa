"""Disassemble cubins with nvdisasm, and read instructions, branches and loops from its listing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from glob import glob
from pathlib import Path

_SEARCH_PATHS = ("/usr/local/cuda*/bin/nvdisasm",)
_SECTION = re.compile(r"^\.text\.(\w+):$")
_LABEL = re.compile(r"^(\.L_\w+):$")
_INSTRUCTION = re.compile(r"^/\*[0-9a-f]+\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;?$")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_BRANCH_TARGETS = re.compile(r"BRANCH_TARGETS ([^\"]+)\"")
_ENDS = ("EXIT", "RET", "BRA", "BRX", "JMP", "JMX", "KILL", "BPT")
_INDIRECT = ("BRX", "JMX")
_TIMEOUT_S = 60.0


class DisassemblerMissing(Exception):
    """nvdisasm is not installed, or cannot read the cubin."""


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str
    """The opcode with its modifiers, such as LDG.E.128."""
    operands: str
    is_predicated: bool
    targets: tuple[str, ...]
    """Labels that it may branch to."""

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Block:
    """Instructions that always run one after another, and the blocks that may follow, by index."""

    instructions: tuple[Instruction, ...]
    followers: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop: the blocks that reach its header again. path: the longest way through them, without inner loops'
    repetitions."""

    blocks: frozenset[int]
    path: tuple[Instruction, ...]


@dataclass(frozen=True)
class Function:
    name: str
    blocks: tuple[Block, ...]

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(instruction for block in self.blocks for instruction in block.instructions)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        return tuple(_find_loops(self.blocks))

    def loop_of(self, *names: str, share: float = 1.0) -> Loop | None:
        """The smallest loop with at least this share of the most instructions of these names that a loop runs; None
        without any in a loop."""
        counts = {loop: sum(each.name in names for each in loop.path) for loop in self.loops}
        most = max(counts.values(), default=0)
        enough = [loop for loop, count in counts.items() if count and count >= share * most]
        return min(enough, key=lambda loop: len(loop.path), default=None)


def disassemble(cubin: bytes) -> dict[str, Function]:
    """Return a cubin's functions by name. Raises DisassemblerMissing."""
    path = find_nvdisasm()
    if path is None:
        raise DisassemblerMissing("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Its dataflow analysis finds targets of an older branch instruction, and is a quarter of its time.
        command = [path, "--print-code", "--no-dataflow", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        raise DisassemblerMissing(f"nvdisasm failed: {done.stderr.strip()[:300]}")
    return parse_listing(done.stdout)


def find_nvdisasm() -> str | None:
    """The program in an installed wheel, on PATH or in a CUDA toolkit; None if there is none."""
    wheels = (path for place in sys.path for path in sorted(Path(place, "nvidia").glob("*/bin/nvdisasm")))
    toolkits = (Path(path) for pattern in _SEARCH_PATHS for path in sorted(glob(pattern)))
    found = next((path for path in (*wheels, *toolkits) if os.access(path, os.X_OK)), None)
    return str(found) if found else shutil.which("nvdisasm")


def parse_listing(text: str) -> dict[str, Function]:
    """Parse the output of `nvdisasm -c`."""
    functions: dict[str, Function] = {}
    lines: list[Instruction | str] = []  # a str is a label
    name = ""
    for line in map(str.strip, [*text.splitlines(), ".text.end:"]):
        if section := _SECTION.match(line):
            if name:
                functions[name] = Function(name, _split(lines))
            name, lines = section[1], []
        elif label := _LABEL.match(line):
            lines.append(label[1])
        elif found := _INSTRUCTION.match(line):
            predicate, opcode, operands = found.groups()
            lines.append(Instruction(opcode, operands, predicate is not None, _targets(opcode, operands)))
    return functions


def count_names(instructions: tuple[Instruction, ...]) -> Counter[str]:
    return Counter(instruction.name for instruction in instructions)


def _targets(opcode: str, operands: str) -> tuple[str, ...]:
    name = opcode.partition(".")[0]
    if name in _INDIRECT and (listed := _BRANCH_TARGETS.search(operands)):
        return tuple(listed[1].split(","))
    return tuple(_TARGET.findall(operands)) if name == "BRA" else ()


def _split(lines: list[Instruction | str]) -> tuple[Block, ...]:
    """Split a function at labels and after branches."""
    parts: list[list[Instruction]] = [[]]
    starts: dict[str, int] = {}
    for line in lines:
        if isinstance(line, str):
            if parts[-1]:
                parts.append([])
            starts[line] = len(parts) - 1
            continue
        parts[-1].append(line)
        if line.name in _ENDS:
            parts.append([])
    return tuple(Block(tuple(part), _followers(part, index, len(parts), starts)) for index, part in enumerate(parts))


def _followers(part: list[Instruction], index: int, count: int, starts: dict[str, int]) -> tuple[int, ...]:
    last = part[-1] if part else None
    falls = last is None or last.name not in _ENDS or last.is_predicated or _has_own_condition(last)
    targets = [starts[label] for label in last.targets if label in starts] if last else []
    return tuple(dict.fromkeys([*targets, *([index + 1] if falls and index + 1 < count else [])]))


def _has_own_condition(branch: Instruction) -> bool:
    """Whether a branch without a predicate has a condition among its operands, as `BRA P1, target` has."""
    return branch.name == "BRA" and re.match(r"!?U?P\d|!?U?R\d", branch.operands) is not None


def _find_loops(blocks: tuple[Block, ...]) -> list[Loop]:
    order = _reverse_postorder(blocks)
    dominators = _dominators(blocks, order)
    members: dict[int, set[int]] = {}
    before: dict[int, list[int]] = {}
    for index in order:
        for follower in blocks[index].followers:
            before.setdefault(follower, []).append(index)
    for end in order:
        for header in blocks[end].followers:
            if header not in dominators[end]:
                continue
            found, pending = members.setdefault(header, {header}), [end]
            while pending:
                if (block := pending.pop()) not in found:
                    found.add(block)
                    pending += before.get(block, [])
    places = {index: place for place, index in enumerate(order)}
    return [Loop(frozenset(found), _longest_path(blocks, header, found, places)) for header, found in members.items()]


def _reverse_postorder(blocks: tuple[Block, ...]) -> list[int]:
    done: list[int] = []
    seen = {0}
    stack = [(0, iter(blocks[0].followers))]
    while stack:
        index, followers = stack[-1]
        following = next((each for each in followers if each not in seen), None)
        if following is None:
            done.append(index)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(blocks[following].followers)))
    return done[::-1]


def _dominators(blocks: tuple[Block, ...], order: list[int]) -> dict[int, set[int]]:
    before: dict[int, list[int]] = {index: [] for index in order}
    for index in order:
        for follower in blocks[index].followers:
            before[follower].append(index)
    found = {index: set(order) for index in order}
    found[order[0]] = {order[0]}
    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            new = set.intersection(*(found[each] for each in before[index])) | {index}
            if new != found[index]:
                found[index], changed = new, True
    return found


def _longest_path(
    blocks: tuple[Block, ...], header: int, members: set[int], places: dict[int, int]
) -> tuple[Instruction, ...]:
    """The most instructions from the header to a block that branches back to it."""
    best: dict[int, tuple[int, int]] = {header: (len(blocks[header].instructions), -1)}
    inside = sorted(members, key=places.__getitem__)
    for index in inside:
        if index not in best:
            continue
        for follower in blocks[index].followers:
            if follower in members and places[follower] > places[index]:
                length = best[index][0] + len(blocks[follower].instructions)
                if length > best.get(follower, (0, 0))[0]:
                    best[follower] = (length, index)
    ends = [index for index in inside if index in best and header in blocks[index].followers]
    path, index = [], max(ends, key=lambda each: best[each][0], default=header)
    while index != -1:
        path.append(index)
        index = best[index][1]
    return tuple(instruction for index in reversed(path) for instruction in blocks[index].instructions)
