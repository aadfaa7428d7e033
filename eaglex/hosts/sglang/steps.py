"""How many steps each verification checks: all, none (paused: the root alone), or as the host's adaptive rule says.

Pure decisions. Every rank takes them for itself, so they depend only on what is the same on all ranks: the order of
forwards and their batch sizes, accept counts, and one table that rank 0 measures and broadcasts.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from eaglex.errors import ConfigError

logger = logging.getLogger(__name__)


class Choice(Protocol):
    """Chooses the steps of the verifications to come."""

    def next(self, batch: int) -> int:
        """Steps to check for a batch of that many requests; 0: no draft is wanted."""

    def observe(self, correct_drafts: list[int], steps: int, batch: int) -> None:
        """What a verification of so many steps accepted of each request, without the bonus token."""


class StepPlan:
    """One forward after the other: what is verified now, and whether a draft is made for the next.

    A draft must have been made before it can be verified, so the first verification after a pause checks roots alone.
    Results come back some forwards later, in the order of the forwards; those of the last BEHIND are remembered.
    """

    BEHIND: ClassVar[int] = 64  # the host's results are two forwards late

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._issued: deque[int] = deque(maxlen=self.BEHIND)
        self.drafting = True
        self.paused_cycles = 0

    def verification(self, batch: int) -> int:
        """Steps that the verification of this batch checks; `drafting` is set for the draft that follows it."""
        wanted = self._choice.next(batch)
        steps = wanted if self.drafting else 0
        self.drafting = wanted > 0
        self.paused_cycles += not self.drafting
        self._issued.append(steps)
        return steps

    def observe(self, correct_drafts: list[int], batch: int) -> None:
        """The result of the oldest verification that has none yet."""
        if self._issued:
            self._choice.observe(correct_drafts, self._issued.popleft(), batch)


@dataclass(frozen=True)
class Always:
    """So many steps, always."""

    steps: int

    def next(self, batch: int) -> int:
        """The steps."""
        return self.steps

    def observe(self, correct_drafts: list[int], steps: int, batch: int) -> None:
        """Changes nothing."""


@dataclass(frozen=True)
class BreakEven:
    """The accept length from which drafting pays, by batch: time of a cycle with a draft over that of one without."""

    minimum: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        batches = [batch for batch, _ in self.minimum]
        if not batches or batches != sorted(set(batches)) or any(least <= 0 for _, least in self.minimum):
            raise ConfigError(f"break-even table: expected ascending batches and positive lengths, got {self.minimum}")

    def at(self, batch: int) -> float:
        """For the next larger batch that was measured; beyond them all, for the largest."""
        return next((least for size, least in self.minimum if size >= batch), self.minimum[-1][1])

    def __str__(self) -> str:
        return ", ".join(f"{batch}: {least:.2f}" for batch, least in self.minimum)


@dataclass
class Pausing:
    """Draft only where it pays: pause below break-even, and draft again where it may pay again.

    A window holds what the last verifications accepted, bonus tokens included, in tokens and requests. While paused
    nothing is learned about the draft, so it is tried again: when the batch changes to a size at which the last known
    accept length pays, and every so often, for as many verifications as a decision needs: fewer where they accept far
    too little. Each trial that fails doubles the time to the next.
    """

    WINDOW: ClassVar[int] = 128  # verifications
    ENOUGH: ClassVar[int] = 8  # of them before anything is decided,
    SCATTER: ClassVar[float] = 1.5  # about, of accept lengths;
    SAMPLE: ClassVar[int] = 64  # with so many requests in all: the mean scatters by 0.2
    SURE: ClassVar[float] = 2.0  # so many times what the mean scatters by below break-even: fewer requests will do
    MARGIN: ClassVar[float] = 0.03  # of the break-even, both ways
    FIRST_TRIAL: ClassVar[int] = 2048  # verifications: at batch 1 a trial takes 64 at most, so 3 % of a draft's cost
    LAST_TRIAL: ClassVar[int] = 32768

    steps: int
    table: BreakEven
    paused: bool = False
    pauses: int = 0
    window: deque[tuple[int, int]] = field(default_factory=deque)
    _waited: int = 0
    _until_trial: int = 0
    _learned: float | None = None  # the accept length when it paused

    def __post_init__(self) -> None:
        self._until_trial = self._until_trial or self.FIRST_TRIAL

    def accept_length(self) -> float | None:
        """Mean over the window, once it says enough."""
        requests = sum(requests for _, requests in self.window)
        if len(self.window) < self.ENOUGH or requests < self.SAMPLE:
            return None
        return sum(tokens for tokens, _ in self.window) / requests

    def far_below(self, least: float) -> float | None:
        """The mean of fewer than are enough, if the true one is below `least` for all that they scatter."""
        requests = sum(requests for _, requests in self.window)
        if len(self.window) < self.ENOUGH or not requests:
            return None
        length = sum(tokens for tokens, _ in self.window) / requests
        return length if length + self.SURE * self.SCATTER / math.sqrt(requests) < least else None

    def next(self, batch: int) -> int:
        """All steps or none."""
        least = self.table.at(batch)
        if self.paused:
            self._waited += 1
            pays = self._learned is not None and self._learned >= least * (1 + self.MARGIN)
            if self._waited >= self._until_trial:
                self.window.clear()  # what is known is old
            self.paused = not pays and self._waited < self._until_trial
        else:
            length = self.accept_length() or self.far_below(least)
            if length is not None and length < least * (1 - self.MARGIN):
                self._pause(length, least, batch)
            elif length is not None and length >= least:
                self._until_trial = self.FIRST_TRIAL
        return 0 if self.paused else self.steps

    def observe(self, correct_drafts: list[int], steps: int, batch: int) -> None:
        """Counts verifications that had drafts to check."""
        if steps and correct_drafts:
            self.window.append((sum(correct_drafts) + len(correct_drafts), len(correct_drafts)))
            if len(self.window) > self.WINDOW:
                self.window.popleft()

    def _pause(self, length: float, least: float, batch: int) -> None:
        self.paused, self._learned, self._waited = True, length, 0
        if self.pauses:
            self._until_trial = min(2 * self._until_trial, self.LAST_TRIAL)
        else:
            logger.info(
                "EAGLEX: drafting pauses, since %.2f tokens per verification are below the %.2f that pay at batch %d. "
                "It is tried again from time to time; later pauses are counted and not logged.",
                length,
                least,
                batch,
            )
        self.pauses += 1


class Adaptive:
    """The host's own adaptive rule (`AdaptiveSpeculativeParams`): steps by batch size, from a moving accept length."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    def next(self, batch: int) -> int:
        """As the host's slot for this batch has it."""
        return int(self.parameters.get_steps_for_batch(batch))

    def observe(self, correct_drafts: list[int], steps: int, batch: int) -> None:
        """Feeds the slot, unless roots alone were checked for want of a draft: that says nothing about it."""
        if steps or not self.next(batch):
            self.parameters.on_verify_complete(correct_drafts, batch)
