"""Refuses a request that has no place, before the work that makes its tokens."""

from __future__ import annotations

from penstock.frontend.generation.failures import backend_unavailable, overloaded
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.request_policy import RequestPolicy
from penstock.shm.client import BackendUnavailable, Overloaded


def check_capacity(served: ServedModel, policy: RequestPolicy, *, may_share: bool) -> None:
    """Refuse a request that the backend would refuse. Raises ApiError.

    may_share: one result may serve it and an equal request. Then even a full backend is asked: an equal request may run
    there, or its result may be cached.
    """
    try:
        served.backend.check_capacity(policy.tenant, may_share=policy.may_join and may_share)
    except Overloaded as error:
        raise overloaded(error.retry_after_s, error.limit) from None
    except BackendUnavailable:
        raise backend_unavailable(served.backend.retry_after_s) from None
