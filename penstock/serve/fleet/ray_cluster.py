"""The cluster that Ray runs. The only module that imports Ray."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import ray
import ray.exceptions
import ray.util
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.serve.fleet.cluster import ClusterError, Report
from penstock.serve.fleet.server_process import ServerProcess

_ANSWER_TIMEOUT_S = 2.0
_ASK_AGAIN_S = 0.2
_ALWAYS = -1
_KEEPER = "keeper"
_KEEPER_GONE_TIMEOUT_S = 10.0
"""Ray notices within this time that the last one has ended."""


class _Actor(ServerProcess):
    """An actor on its node. It has one thread for calls, the main one."""

    def __init__(self, number: int, options: Sequence[str], environment: Mapping[str, str]) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        super().__init__(number, options, environment, host=ray.util.get_node_ip_address(), node_id=node_id)


class _KeeperMark:
    """An actor that lives as long as the keeper's process."""


class RayCluster:
    """Servers are named actors of one namespace, detached, so that they outlive the keeper.

    Ray restarts an actor whose process has died, on its node. If the node has died, the keeper places the number again.
    """

    def __init__(
        self,
        name: str,
        address: str | None,
        needs: Mapping[str, float],
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """needs are the resources of one server, such as {"GPU": 1}. Raises ClusterError."""
        self._needs, self._options, self._environment = needs, options, environment or {}
        try:
            ray.init(
                address=address or "auto", namespace=f"penstock-{name}", log_to_driver=False, logging_level="warning"
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(f"no Ray cluster at {address or 'this machine'}: {_line(error)}") from error

    def claim(self) -> None:
        """Become the only keeper of these servers until this process ends. Raises ClusterError if there is another."""
        deadline_s = time.monotonic() + _KEEPER_GONE_TIMEOUT_S
        with _translated():
            while _find(_KEEPER) is not None:
                if time.monotonic() > deadline_s:
                    raise ClusterError("`penstock ray up` runs for these servers already: stop it first")
                time.sleep(_ASK_AGAIN_S)
            self._mark = ray.remote(_KeeperMark).options(name=_KEEPER, num_cpus=0).remote()

    def nodes(self) -> Sequence[str]:
        with _translated():
            return [
                node["NodeID"]
                for node in ray.nodes()
                if node["Alive"] and all(node["Resources"].get(name, 0) >= need for name, need in self._needs.items())
            ]

    def numbers(self) -> set[int]:
        with _translated():
            return {int(name) for name in ray.util.list_named_actors() if name.isdigit() and len(name) <= 4}

    def reports(self, numbers: Sequence[int]) -> dict[int, Report | None]:
        with _translated():
            found: dict[int, Report | None] = {}
            asked = {}
            for number in numbers:
                actor = _find(number)
                if actor is None:
                    found[number] = None
                else:
                    asked[actor.report.remote()] = number
            answered, _ = (
                ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_TIMEOUT_S) if asked else ([], [])
            )
            for reference in answered:
                try:
                    found[asked[reference]] = msgspec.convert(ray.get(reference), Report)
                except ray.exceptions.ActorUnavailableError:
                    continue  # it is being restarted
                except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError):
                    found[asked[reference]] = None
            return found

    def place(self, number: int, node_id: str) -> None:
        with _translated():
            actor = ray.remote(_Actor).options(
                name=str(number),
                lifetime="detached",
                max_restarts=_ALWAYS,
                num_cpus=self._needs.get("CPU", 0),
                num_gpus=self._needs.get("GPU", 0),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            actor.remote(number, tuple(self._options), dict(self._environment))

    def drain(self, number: int) -> None:
        with _translated():
            if (actor := _find(number)) is not None:
                ray.get(actor.drain.remote(), timeout=_ANSWER_TIMEOUT_S)

    def remove(self, number: int) -> None:
        with _translated():
            if (actor := _find(number)) is not None:
                ray.kill(actor, no_restart=True)

    def want_nodes(self, count: int) -> None:
        with _translated():
            request_resources(bundles=[dict(self._needs)] * count)

    def close(self) -> None:
        ray.shutdown()


class _translated:  # noqa: N801 - used as a function
    """Turn Ray's exceptions in the block into ClusterError."""

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, ray.exceptions.RayError | ConnectionError | ValueError):
            raise ClusterError(f"Ray: {_line(error)}") from error


def _find(name: int | str) -> Any:
    try:
        return ray.get_actor(str(name))
    except ValueError:
        return None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
