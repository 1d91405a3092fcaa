"""The models of one worker: the model of each backend, and which backend answers a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from penstock.frontend.generation.models.served_model import ModelKeeper, ServedModel
from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten
from penstock.shm.messages import ModelCard, PooledKind

Task: TypeAlias = Literal["generate", "rerank", "score", "pooled", "any"] | PooledKind
"""A task for which an endpoint needs a model.

rerank is classify with one score; score is rerank or embed; pooled is a vector of any kind; any is the tokenizer alone.
"""

_EMBEDDING_TASKS = ("embed", "token_embed", "sparse", "pooled")
_ANY_NAME = "*"
_WORDS = {
    "generate": "generate text",
    "embed": "compute embeddings",
    "token_embed": "compute embeddings of tokens",
    "sparse": "compute sparse embeddings",
    "classify": "classify",
    "rerank": "rerank",
    "score": "score pairs of texts",
    "pooled": "compute vectors",
    "token_classify": "classify tokens",
}


def abilities(card: ModelCard) -> list[Task]:
    """Return the model's abilities, in the order of `Task`."""
    tasks: list[Task] = ["generate"] if card.generates else []
    for pooled in card.pooled:
        tasks += ["rerank", "classify"] if pooled.kind == "classify" and pooled.num_values == 1 else [pooled.kind]
    return tasks


def can_do(card: ModelCard, task: Task) -> bool:
    if task in ("any", "pooled"):
        return task == "any" or bool(card.pooled)
    known = abilities(card)
    return task in known or (task == "score" and ("rerank" in known or "embed" in known))


class ServedModels:
    """The keepers of a worker's backends. One backend may be in several roles; then its keeper is the same object."""

    def __init__(
        self,
        generation: ModelKeeper,
        *,
        embedding: ModelKeeper | None = None,
        rerank: ModelKeeper | None = None,
        others: Iterable[ModelKeeper] = (),
    ) -> None:
        """generation is the backend of a server that has only one, whatever its model can do. others have no role."""
        self.generation = generation
        self._embedding = embedding
        self._rerank = rerank
        self.keepers = _distinct((generation, embedding, rerank, *others))

    def in_order(self, task: Task) -> tuple[ModelKeeper, ...]:
        """Return all keepers, the one whose role is the task first."""
        if task in _EMBEDDING_TASKS:
            return _distinct((self._embedding, *self.keepers))
        if task in ("rerank", "score", "classify", "token_classify"):
            return _distinct((self._rerank, *self.keepers))
        return self.keepers

    def find(self, task: Task, requested: str | None) -> ModelKeeper:
        """Return the keeper of the model that a request names, or without a name the first one that can do the task.
        If its model is not loaded yet, it may turn out to be another, unless the keeper knows the model's name.

        Raises ApiError if there is no such model, or if it cannot do the task.
        """
        keepers = self.in_order(task)
        for keeper in keepers:
            keeper.take_adapters()
        loaded = [keeper.current for keeper in keepers if keeper.current is not None]
        for keeper in keepers:
            served = keeper.current
            if requested is None and (served is None or can_do(served.card, task)):
                return keeper
            if served is None and keeper.name is not None and requested == keeper.name:
                return keeper
            if served is not None and requested is not None and is_named(served.card, requested):
                check_task(served.card, task)
                _check_adapter(served.card, task, requested)
                return keeper
        for served in loaded:
            if requested is not None and takes_any_name(served.card) and can_do(served.card, task):
                return next(keeper for keeper in keepers if keeper.current is served)
        pending = next((keeper for keeper in keepers if keeper.current is None and keeper.name is None), None)
        if pending is not None:
            return pending
        if requested is not None:
            raise unknown_model(requested, [name for keeper in keepers for name in names_of(keeper)])
        raise _unable(task, [served.card for served in loaded])

    def check_adapter_name(self, name: str, base: ServedModel) -> None:
        """Raises ApiError if another model or its adapter has the name. The base itself checks its own."""
        for keeper in self.keepers:
            keeper.take_adapters()
            if keeper.backend is not base.backend and name in names_of(keeper):
                message = f"lora_name: {shorten(name)} is the name of another model of this server or of its adapter"
                raise ApiError(ErrorKind.INVALID_VALUE, message, param="lora_name")

    def tei_task(self, requested: str | None) -> Task:
        """The task whose model's tokenizer TEI's endpoints use: without a name a model that computes vectors, if the
        server has one."""
        has_role = self._embedding is not None or self._rerank is not None
        has_vectors = has_role or any(can_do(served.card, "pooled") for served in self.loaded())
        return "pooled" if requested is None and has_vectors else "any"

    def loaded(self) -> list[ServedModel]:
        return [keeper.current for keeper in self.keepers if keeper.current is not None]

    def none_will_come(self) -> bool:
        """Whether no model is loaded and none is expected soon."""
        return all(keeper.current is None and keeper.settled.is_set() for keeper in self.keepers)


def is_named(card: ModelCard, name: str) -> bool:
    """Whether the name is the model's, an alias or an adapter's."""
    is_own = name == card.model_id or (name in card.aliases and name != _ANY_NAME)
    return is_own or card.adapter_named(name) is not None


def takes_any_name(card: ModelCard) -> bool:
    return _ANY_NAME in card.aliases


def listed_names(card: ModelCard) -> list[str]:
    """Return the model's names, starting with the one in its answers, then those of its adapters."""
    own = [card.model_id, *(name for name in card.aliases if name != _ANY_NAME)]
    return [*own, *(adapter.name for adapter in card.adapters)]


def answering_name(card: ModelCard, requested: str | None) -> str:
    """Return the name in answers: an adapter's own, else the model's."""
    adapter = None if requested is None else card.adapter_named(requested)
    return card.model_id if adapter is None else adapter.name


def names_of(keeper: ModelKeeper) -> list[str]:
    """Return the names of its model; for one that has never been loaded, the operator's name for it."""
    if keeper.current is not None:
        return listed_names(keeper.current.card)
    return [] if keeper.name is None else [keeper.name]


def check_task(card: ModelCard, task: Task) -> None:
    """Raises ApiError if the model cannot do the task."""
    if not can_do(card, task):
        raise _unable(task, [card])


def _check_adapter(card: ModelCard, task: Task, requested: str) -> None:
    """Raises ApiError if the name is an adapter's and the task does not generate text."""
    if task not in ("any", "generate") and card.adapter_named(requested) is not None:
        message = f"model: {shorten(requested)} is an adapter, which only generates text; {card.model_id} is its model"
        raise ApiError(ErrorKind.WRONG_MODEL, message, param="model")


def check_model(requested: str | None, card: ModelCard) -> None:
    """Raises ApiError if a request names another model than this one."""
    if requested is not None and not is_named(card, requested) and not takes_any_name(card):
        raise unknown_model(requested, listed_names(card))


def unknown_model(requested: str, names: Iterable[str], field: str = "model") -> ApiError:
    known = ", ".join(map(shorten, names)) or "none"
    message = f"{field}: {shorten(requested)} does not exist; this server has {known}"
    return ApiError(ErrorKind.UNKNOWN_MODEL, message, param=field)


def _unable(task: Task, cards: Iterable[ModelCard]) -> ApiError:
    known = "; ".join(f"{shorten(card.model_id)} can {_list_of(abilities(card))}" for card in cards)
    message = f"model: this endpoint needs one that can {_WORDS[task]}; {known}"
    return ApiError(ErrorKind.WRONG_MODEL, message, param="model")


def _list_of(tasks: list[Task]) -> str:
    words = [_WORDS[task] for task in tasks] or ["do nothing"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _distinct(keepers: Iterable[ModelKeeper | None]) -> tuple[ModelKeeper, ...]:
    return tuple(dict.fromkeys(keeper for keeper in keepers if keeper is not None))
