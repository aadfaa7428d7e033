"""Calls of ours around methods of the host that have no hook of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from eaglex.hosts.sglang import compat

# of the host's SchedulerWeightUpdaterManager: all ways to change a target's weights
UPDATES: Final = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


def around(
    owner: Any, name: str, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> None:
    """Replace `owner.name` by itself with two actions around it; `after` runs only where it returned."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        if before is not None:
            before()
        result = original(self, *arguments, **options)
        if after is not None:
            after()
        return result

    setattr(owner, name, wrapped)


def at_the_end_of_a_turn(action: Callable[[], None]) -> None:
    """Run `action` in every turn of the scheduler's overlapped loop, idle ones too, after the results are passed on.

    The loop has no hook of its own; the last method that it calls in each turn is the one that samples late.
    """
    around(compat.symbol("Scheduler"), "launch_batch_sample_if_needed", after=action)
