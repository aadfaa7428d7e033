"""What a run of speculation did: accept length, acceptance per position, time by phase."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch


class Phases:
    """Time by phase. Marks cut the run into pieces; a piece bears the name of the mark that ends it.

    On a GPU the marks are events on the current stream, so nothing waits until `microseconds` is asked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str | None, Any]] = []

    def start(self) -> None:
        """Begin a piece; the time since the last mark belongs to no phase."""
        self._marks.append((None, self._now()))

    def mark(self, name: str) -> None:
        """End the current piece, which belongs to phase `name`, and begin the next."""
        self._marks.append((name, self._now()))

    def microseconds(self) -> dict[str, float]:
        """The sum per phase, in the order of first appearance."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        totals: dict[str, float] = {}
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            if name is not None:
                totals[name] = totals.get(name, 0.0) + self._elapsed(before, after)
        return totals

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _elapsed(self, before: Any, after: Any) -> float:
        if self._device.type != "cuda":
            return float(after - before) / 1e3
        return float(before.elapsed_time(after)) * 1e3


@dataclasses.dataclass
class Statistics:
    """Accept lengths of all cycles of one run; a cycle is one verification of one request, with or without a draft."""

    WATCHED_CYCLES = 32
    HOPELESS = 1.05

    num_steps: int
    cycles: int = 0
    drafts: int = 0
    emitted: int = 0
    emitted_with_draft: int = 0
    reached: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached = [0] * self.num_steps

    def record(self, accept_length: int, *, had_draft: bool) -> None:
        """Count one cycle. An end-of-text token that was drafted counts as the bonus token: nothing follows it."""
        self.cycles += 1
        self.emitted += accept_length
        if had_draft:
            self.drafts += 1
            self.emitted_with_draft += accept_length
        for position in range(accept_length - 1):
            self.reached[position] += 1

    @property
    def accept_length(self) -> float:
        """Tokens per cycle, the bonus token counted; 1 + sum(acceptance_per_position). 0 without a cycle."""
        return self.emitted / self.cycles if self.cycles else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """[K]: the share of all cycles in which drafted tokens were accepted to depth 1, 2, .. K."""
        return [count / self.cycles if self.cycles else 0.0 for count in self.reached]

    def complaint(self) -> str | None:
        """What is wrong with a draft that never hits, once that is beyond chance."""
        if (
            self.num_steps
            and self.drafts >= self.WATCHED_CYCLES
            and self.emitted_with_draft < self.HOPELESS * self.drafts
        ):
            return (
                f"accept length stays at {self.emitted_with_draft / self.drafts:.1f} after {self.drafts} drafts: "
                f"wrong head or wrong auxiliary layers?"
            )
        return None
