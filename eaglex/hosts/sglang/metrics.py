"""eaglex's own counters on the host's `/metrics`, beside the host's accept length, rate, steps and nodes.

The host collects what its processes write with prometheus_client (its directory is in the environment before any
process of it exists). What the engine counts lies on the device: it is copied now and then behind a draft, and looked
at later, so that nothing waits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from eaglex.engine import LaneStatus

LANES: Final = "eaglex:lanes"
PAUSED: Final = "eaglex:paused_cycles"
DRAFTER: Final = "eaglex:drafter"
EVERY: Final = 64  # launches

Entered = Callable[[], contextlib.AbstractContextManager[Any]]


@functools.cache
def _counters(registry: Any) -> tuple[Any, Any, Any]:
    """The process's metrics; prometheus_client allows each name once."""
    from prometheus_client import REGISTRY, Counter

    where = registry or REGISTRY
    lanes = Counter(
        LANES,
        "Requests of draft launches by what became of them: drafted, held (a prompt's chunk, or drafting pauses), "
        "padded, stopped early, or no draft because of no_room, not_finite, bad_index.",
        ["model_name", "tp_rank", "outcome"],
        registry=where,
    )
    paused = Counter(
        PAUSED, "Verifications after which nothing was drafted.", ["model_name", "tp_rank"], registry=where
    )
    drafter = Counter(
        DRAFTER,
        "Falls of a dedicated drafter by kind (late, gone, refused, bad_reply, own_failure), and its returns.",
        ["model_name", "tp_rank", "event"],
        registry=where,
    )
    return lanes, paused, drafter


class Metrics:
    """Counts of one worker. `after_launch` is called with the engine's counters, behind its launch; `entered` makes the
    stream of that torch's current one.
    """

    def __init__(
        self, model_name: str, tp_rank: int, *, device: torch.device, entered: Entered, registry: Any = None
    ) -> None:
        self._lanes, paused, self._drafter = _counters(registry)
        self._drafter_seen: dict[str, int] = {}
        self._labels = {"model_name": model_name, "tp_rank": str(tp_rank)}
        self._paused = paused.labels(**self._labels)
        self._seen, self._paused_seen, self._launches = [0] * len(LaneStatus), 0, 0
        self._gpu = device.type == "cuda"
        self._copy = torch.zeros(len(LaneStatus), dtype=torch.int64, pin_memory=self._gpu)
        self._copied: Any = None
        self._entered = entered

    def after_launch(self, counters: Tensor) -> None:
        """Copy the counters behind every EVERY-th launch; add up what has come over since the last look."""
        self._launches += 1
        if self._copied is not None and self._copied.query():
            self._take()
        if self._launches % EVERY or self._copied is not None:
            return
        with self._entered():
            self._copy.copy_(counters, non_blocking=True)
            if self._gpu:
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()
        if not self._gpu:
            self._take()

    def paused(self, cycles: int) -> None:
        """Paused cycles since the start."""
        if cycles > self._paused_seen:
            self._paused.inc(cycles - self._paused_seen)
            self._paused_seen = cycles

    def drafter(self, counts: dict[str, int]) -> None:
        """What has become of a dedicated drafter since the start, by event."""
        for event, now in counts.items():
            new = now - self._drafter_seen.get(event, 0)
            if new > 0:
                self._drafter.labels(**self._labels, event=event).inc(new)
                self._drafter_seen[event] = now

    def restart(self) -> None:
        """The engine is another one, and counts from zero."""
        self._seen, self._copied = [0] * len(LaneStatus), None

    def _take(self) -> None:
        self._copied = None
        for status, now in zip(LaneStatus, self._copy.tolist(), strict=True):
            new = now - self._seen[status]
            if new > 0:
                self._lanes.labels(**self._labels, outcome=status.name.lower()).inc(new)
                self._seen[status] = now


def of(server_args: Any, tp_rank: int, device: torch.device, entered: Entered) -> Metrics | None:
    """Where the host has metrics on, on the rank that drafts."""
    if not server_args.enable_metrics or tp_rank != 0:
        return None
    return Metrics(server_args.served_model_name, tp_rank, device=device, entered=entered)
