"""Break-even, measured at start: from which accept length a cycle with a draft is worth its time.

With a draft: the target's captured verification of all nodes, and the draft's launch. Without: the target's captured
decode, and a decode's part of the launch that keeps fc, K and V of every token (kept_rows.py). Both on the GPU alone
and over short contexts; what the host adds is in neither, so where the CPU is what a server waits for, drafting pays
from fewer tokens than this says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from eaglex.hosts.sglang.steps import BreakEven
from eaglex.hosts.sglang.verify_states import VerifyState, VerifyStates

PASSES: Final = 4  # over all that is timed; the least counts: what else a GPU does only lengthens
WARM_UPS: Final = 1
ROUNDS: Final = 4

Clock = Callable[[Callable[[], object]], float]


class Trials(Protocol):
    """The draft's side of it, on a rank that drafts or on another."""

    def trial(self, requests: int, nodes: int, *, drafting: bool) -> Callable[[], None]:
        """One launch after verification of so many requests and nodes, on the current stream."""

    def end_trials(self) -> None:
        """Leave no trace of them."""


def clock_of(device: torch.device) -> Clock:
    """Seconds that an action takes on this device: the mean of several, one behind the other."""

    def on_the_gpu(action: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(WARM_UPS):
            action()
        begin.record()
        for _ in range(ROUNDS):
            action()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / ROUNDS

    def on_the_cpu(action: Callable[[], object]) -> float:
        action()
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            action()
        return (time.perf_counter() - begin) / ROUNDS

    return on_the_gpu if device.type == "cuda" else on_the_cpu


def measure(states: VerifyStates, trials: Trials, *, steps: int, clock: Clock, limit: int, rows: int) -> BreakEven:
    """The table, for captured batches that are powers of two, at most `limit`; all ranks call it together. While paused
    one launch keeps so many `rows` of a request.

    Replays the host's graphs on what they were captured with: its padding rows, which belong to nobody. A verification
    counts as a decode's time at least: on a GPU that something else disturbs a draft would else seem to pay always.
    """
    wide, narrow = states[steps], states[0]
    found = []
    for batch in batches(wide, narrow, limit):
        verification, decode, draft, keep = least(
            clock,
            replay(wide, batch),
            replay(narrow, batch),
            trials.trial(batch, wide.nodes, drafting=True),
            trials.trial(batch, rows, drafting=False),
        )
        found.append((batch, (max(verification, decode) + draft) / (decode + keep / rows)))
    trials.end_trials()
    return BreakEven(tuple(found))


def least(clock: Clock, *actions: Callable[[], object]) -> list[float]:
    """The least time of each over several passes in turn."""
    passes = [[clock(action) for action in actions] for _ in range(PASSES)]
    return [min(times) for times in zip(*passes, strict=True)]


def batches(wide: VerifyState, narrow: VerifyState, limit: int) -> list[int]:
    """Powers of two that both have graphs for."""
    both = set(wide.graph_runner.capture_bs) & set(narrow.graph_runner.capture_bs)
    return [batch for batch in sorted(both) if batch <= limit and batch & (batch - 1) == 0]


def replay(state: VerifyState, batch: int) -> Callable[[], object]:
    """The target's graph for that batch."""
    runner: Any = state.graph_runner
    variant = "nolora" if getattr(runner, "record_nolora_graph", False) else None
    key = runner._make_graph_key(batch, variant_label=variant)

    def once() -> None:
        with runner.backend.replay_session():
            runner.backend.replay(key, None)

    return once
