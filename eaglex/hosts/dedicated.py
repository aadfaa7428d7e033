"""Rank 0 with a dedicated drafter: the draft runs in a process of its own, which may fail, be late, and come back."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch

from eaglex.bridge import Invitation, LinkOptions
from eaglex.bridge_dedicated import DrafterClient, RelayClient
from eaglex.config import DraftConfig, EngineLimits
from eaglex.engine import DraftResults
from eaglex.errors import BridgeError
from eaglex.hosts.draft_slots import DraftRows, batch_of
from eaglex.hosts.shared_slots import Link, SharedSlots, lanes_of, results_device

logger = logging.getLogger(__name__)

# Seconds until a drafter that has ended is started again: this, then twice as long each time.
FIRST_RESTART, LAST_RESTART = 1.0, 64.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DedicatedPlan:
    """How a dedicated drafter is started and waited for.

    `job(invitation, limits, max_length)` is what it reads (eaglex.drafter.Job, as JSON).
    """

    job: Callable[[Invitation, EngineLimits, int], str]
    options: LinkOptions
    device: str = "cpu"

    def relays(self, target: torch.device, transport: str | None) -> bool:
        """Whether its rows and drafts go from GPU to GPU."""
        return target.type == "cuda" and self.device.startswith("cuda") and transport != "shm"


COMMAND = (sys.executable, "-m", "eaglex.drafter")


class DrafterProcess:
    """Keeps a process alive that `command` and this process's id start, and that reads `job` from its stdin: a job says
    how rank 0's memory is reached, which a command line would tell every user of the machine.
    """

    def __init__(self, command: Sequence[str], job: str) -> None:
        self._command, self._job = list(command), job.encode()
        self._pause, self._restart_at = FIRST_RESTART, 0.0
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Of the present process."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def keep(self) -> None:
        """Start it again if it has ended and rested. Never waits."""
        if self._process.poll() is None:
            return
        now = time.monotonic()
        if self._restart_at == 0.0:
            self._restart_at = now + self._pause
        elif now >= self._restart_at:
            self._pause, self._restart_at = min(2 * self._pause, LAST_RESTART), 0.0
            try:
                self._process = self._start()
            except OSError as error:  # no memory, no process id, no file left: rests again
                logger.warning("the drafter was not started again: %s", error)

    def close(self) -> None:
        """End it, at the latest after two seconds by force: it may be stopped."""
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        started = subprocess.Popen([*self._command, str(os.getpid())], stdin=subprocess.PIPE, stdout=sys.stderr)
        assert started.stdin is not None
        with contextlib.suppress(OSError), started.stdin:  # a pipe holds more than a job; one that has ended is seen
            started.stdin.write(self._job)
        return started


class DedicatedSlots(SharedSlots):
    """Rank 0's slots: rows go to the drafter, its drafts to all ranks. Nothing that the drafter does raises here.

    Requests have up to `max_length` tokens. Raises BridgeError where the drafter does not even start.
    """

    def __init__(
        self, config: DraftConfig, link: Link, *, plan: DedicatedPlan, max_length: int, device: torch.device
    ) -> None:
        here = results_device(link, device)
        super().__init__(link, DraftResults.allocate(link.speculation, link.limits, here), device)
        kind: type[DrafterClient | RelayClient] = RelayClient if link.relay else DrafterClient
        self.client = kind(self._bridge, config, plan.options)
        job = plan.job(self.client.invitation(), link.limits, max_length)
        self.process = DrafterProcess(COMMAND, job)
        with contextlib.ExitStack() as undo:
            undo.callback(self.process.close)
            with link.team.members.step("drafter"):
                self._wait(link.team.options.join_deadline)
            undo.pop_all()

    def run(self, rows: Sequence[DraftRows]) -> None:
        """One cycle: rows to the drafter, and what has come back by its deadline to all ranks."""
        self.process.keep()
        slots, new_lens = lanes_of(rows)
        batch = batch_of(rows, device=self._bridge.device)
        if isinstance(self.client, RelayClient):
            drafted = self.client.draft(batch, slots=slots, seq_lens=[r.length for r in rows], new_lens=new_lens)
        else:
            drafted = self.client.draft(batch)
        self._bridge.push(slots, new_lens, draft=drafted)

    def skip(self, rows: Sequence[DraftRows]) -> None:
        """Never called: this draft does not fail."""
        raise AssertionError(rows)

    def take_warnings(self) -> list[str]:
        """What is to be told since the last call: one sentence per fall of the drafter."""
        return self.client.take_warnings()

    def bridge_counters(self) -> dict[str, int]:
        """Messages and drafts, the drafter's falls by kind, and its returns."""
        return {**super().bridge_counters(), **self.client.counters()}

    def close(self) -> None:
        """End the drafter's process."""
        self.process.close()

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.client.joined():
            code = self.process.exit_code()
            if code is not None:
                raise BridgeError(f"dedicated drafter: expected it to join, got exit code {code}; it says why above")
            if time.monotonic() >= until:
                raise BridgeError(f"dedicated drafter: expected it to join within {seconds:g} s, got no word")
            time.sleep(0.02)
