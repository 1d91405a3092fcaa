"""Moves the streams of a backend that still computes them: it drains, or a successor has taken its socket over.

A stream stays where it is until the other backend has computed all of its tokens so far. A request of one token does
that, and its pages stay in the prefix cache there. So the move itself costs one step, however long the stream is.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeGuard

from penstock.shm.client.capacity import BackendUnavailable, Overloaded
from penstock.shm.client.replicas.replica_chooser import Replica
from penstock.shm.client.request import GenerationRequest
from penstock.shm.client.streams.open_stream import OpenStream
from penstock.shm.client.streams.token_stream import TokenStream
from penstock.shm.messages import Finish, Sampling

logger = logging.getLogger("penstock.client")

_LONGEST_S = 10.0
"""A stream whose tokens are not computed by then moves anyway."""
_MOVED_TOGETHER = 8
"""Streams. Their first step on the other backend also computes what each has generated since its preparation."""
_FEW_TOKENS = 2
"""Tokens of a stream; a step that computes so many is hardly longer than one that computes one."""
_FEWER = 0.8
"""Another round follows one that left fewer tokens than this part of what the round before left."""
_NEXT_TOKEN_S = 0.1
_LOOK_EVERY_S = 0.001
_GREEDY = Sampling(temperature=0.0)


class HandOver:
    """The streams of one leaving replica. `run` returns when all have moved, or when the replica stops computing."""

    def __init__(
        self,
        source: Replica,
        choose: Callable[[OpenStream, Replica], Replica | None],
        move: Callable[[Replica, Sequence[OpenStream], Replica], None],
        together: Callable[[OpenStream], int | None],
    ) -> None:
        """choose returns the replica to which a stream of the source should move; None if there is none now. together
        returns the same number for streams that share a sequence; None for one that shares none."""
        self._source = source
        self._choose = choose
        self._move = move
        self._together = together
        self.num_moved = 0

    async def run(self) -> None:
        groups: dict[object, list[OpenStream]] = {}
        for stream in self._source.client.open_streams:
            groups.setdefault(self._together(stream) or stream, []).append(stream)
        several: list[list[OpenStream]] = []
        for group in groups.values():
            several.append(group)
            if sum(map(len, several)) >= _MOVED_TOGETHER:
                await self._hand_over(several)
                several = []
        await self._hand_over(several)
        if self.num_moved:
            logger.info("%d streams of a leaving backend continue on another", self.num_moved)

    async def _hand_over(self, groups: Sequence[Sequence[OpenStream]]) -> None:
        targets: dict[int, Replica] = {}
        # One by one: the old backend goes on beside it, so its steps should stay short.
        for index, group in enumerate(groups):
            if self._source.computes and (target := await self._prepare(group)) is not None:
                targets[index] = target
        running = {index: target for index, target in targets.items() if any(map(_is_generating, groups[index]))}
        # Then, all together, the tokens generated meanwhile: each round takes less time, so it leaves fewer.
        num_left = sys.maxsize
        while running and num_left > _FEW_TOKENS * len(running):
            num_before, num_to_beat = self._num_tokens(groups), num_left * _FEWER
            await asyncio.gather(*(self._prepare(groups[index], target) for index, target in running.items()))
            num_left = self._num_tokens(groups) - num_before
            if num_left >= num_to_beat:
                break
        if running:
            await self._next_token(groups)
        for index, target in targets.items():
            moving = [stream for stream in self._still_there(groups[index]) if not stream.is_bound]
            if moving and self._source.computes and target.client.ready:
                self._move(self._source, moving, target)
                self.num_moved += len(moving)

    async def _next_token(self, groups: Sequence[Sequence[OpenStream]]) -> None:
        """Wait until streams have just received tokens: then the pause that the move makes begins late."""
        num_before, deadline_s = self._num_tokens(groups), time.monotonic() + _NEXT_TOKEN_S
        while self._num_tokens(groups) == num_before and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY_S)  # streams tell only their readers of tokens

    def _num_tokens(self, groups: Sequence[Sequence[OpenStream]]) -> int:
        return sum(len(group[0].tokens) for group in groups)

    async def _prepare(self, group: Sequence[OpenStream], target: Replica | None = None) -> Replica | None:
        """Let the target, or one that it chooses, compute a group's tokens so far. None if there is no target."""
        group = self._still_there(group)
        if not group:
            return None
        longest = max(group, key=lambda stream: len(stream.tokens))
        target = target or self._choose(longest, self._source)
        if target is None or not target.has_adapter(longest.message.adapter):
            return None
        if _is_generating(longest):
            await _compute(longest, target)
        return target

    def _still_there(self, group: Sequence[OpenStream]) -> list[OpenStream]:
        """The streams that have not ended while others were moved."""
        streams = set(self._source.client.open_streams)
        return [stream for stream in group if stream in streams]


def _is_generating(stream: OpenStream) -> TypeGuard[TokenStream]:
    return isinstance(stream, TokenStream) and stream.has_tokens and not stream.is_queued


async def _compute(stream: TokenStream, target: Replica) -> None:
    """Let the target compute a stream's tokens so far. If it cannot, it computes them after the move."""
    model, message, tokens = target.client.model, stream.message, stream.tokens[:]
    if model is None or len(tokens) >= model.max_context_tokens:
        return
    request = GenerationRequest(
        tokens,
        1,
        _GREEDY,
        salt=message.salt,
        tenant=message.tenant,
        weight=message.weight,
        priority=message.priority,
        may_share=message.may_share,
        adapter=message.adapter,
        pictures=message.pictures,
        pixels=stream.pixels,
    )
    try:
        computing = target.client.submit(request)
    except (BackendUnavailable, Overloaded):
        return
    try:
        async with asyncio.timeout(_LONGEST_S):
            async for batch in computing:
                if batch.finish is not Finish.NONE:
                    return
    except TimeoutError:
        logger.warning("a backend has not computed %d tokens in %g s", len(tokens), _LONGEST_S)
    finally:
        computing.cancel()
