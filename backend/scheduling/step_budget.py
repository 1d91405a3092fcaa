"""Divides a step's tokens among prompts that are not computed yet."""

from __future__ import annotations

_RESERVED_PART = 4
"""A quarter of a step is reserved for short prompts: they finish soon, and long prompts hardly notice."""

# A step has room for a fixed number of tokens, because every stream waits for its end. Decodes come first, with one
# token each. What they leave is this budget, and prompts share it:
#
#   |------------- 3/4 -------------|--- 1/8 ---|--- 1/8 ---|
#    the first prompts, in order     shortest    newcomers
#
# The first part goes to the first prompt, as far as it needs it, and then to the next: many prompts computed in halves
# would bring no token. Without the reserve, a prompt of 100,000 tokens would keep one of ten waiting for all its steps.
# With it the short one starts in the next step, and the long one takes a third longer at most. Newcomers have a part of
# their own, because prompts that run already could use up the reserve of each step.
#
# No token of the budget is wasted while a prompt needs it: what newcomers leave goes back to the running prompts.


def share_out(needs: list[int], budget: int, *, num_of_first_tenant: int, someone_waits: bool) -> tuple[list[int], int]:
    """Return how many tokens of each prompt the step computes, and how many are left for newcomers.

    needs are the prompts' missing tokens, in order. If all fit, all are computed. If not, the first prompts get three
    quarters. The prompts of the first tenant with the fewest missing tokens get the rest; half of it is left for
    newcomers if someone waits. So neither a long prompt nor a short one waits for all others.
    """
    left = budget - sum(needs)
    if left >= 0:
        return needs, left
    reserve = max(1, budget // _RESERVED_PART) if budget > 1 and (someone_waits or len(needs) > 1) else 0
    newcomers = (reserve + 1) // 2 if someone_waits else 0
    grants = [0] * len(needs)
    _grant(grants, needs, range(len(needs)), budget - reserve)
    shortest_first = sorted(range(num_of_first_tenant), key=lambda index: needs[index] - grants[index])
    shortest_first += range(num_of_first_tenant, len(needs))
    _grant(grants, needs, shortest_first, reserve - newcomers)
    return grants, newcomers


def _grant(grants: list[int], needs: list[int], order: range | list[int], budget: int) -> None:
    for index in order:
        grant = min(needs[index] - grants[index], budget)
        grants[index] += grant
        budget -= grant
        if not budget:
            return
