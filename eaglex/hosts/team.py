"""The ranks of a tensor-parallel target, started by torchrun: one of them drafts and decides, all of them verify.

A rank that is lost, late or set up differently ends the run on all ranks with a BridgeError that names it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from eaglex.bridge import Bridge, BridgeOptions, Members
from eaglex.errors import BridgeError, ConfigError, EaglexError, first_line
from eaglex.hosts.team_watch import TeamWatch
from eaglex.reference import Accepted


def num_ranks() -> int:
    """Ranks that torchrun started; 1 without it. Raises ConfigError for an environment that is not torchrun's."""
    text = os.environ.get("WORLD_SIZE", "1")
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"WORLD_SIZE: expected a number as torchrun sets it, got {text!r}") from error


class Team:
    """This process as a rank of torchrun's. A context manager: on exit it waits for the others, or ends their run.

    `members` exchange values from the beginning; `start` makes the target's process group; `bridge` is set by whoever
    makes the slots (shared_slots.py). Raises BridgeError.
    """

    def __init__(self, options: BridgeOptions) -> None:
        self.options = options
        self.bridge: Bridge | None = None
        self._watch: TeamWatch | None = None
        self.device = torch.device("cpu")
        join = datetime.timedelta(seconds=options.join_deadline)
        try:
            found = next(rendezvous("env://", timeout=join))
            self._store: Any = found[0]
            self.rank, self.num_ranks = int(found[1]), int(found[2])
        except (RuntimeError, ValueError) as error:
            raise BridgeError(f"torchrun: expected to reach its store, got {error}") from error
        self.members = Members(
            PrefixStore("eaglex", self._store),
            rank=self.rank,
            num_ranks=self.num_ranks,
            deadline=options.join_deadline,
        )

    @property
    def drafts(self) -> bool:
        """Whether this rank has the draft."""
        return self.rank == 0

    def start(self, device: torch.device) -> torch.device:
        """Make the process group that the target's collectives use; this rank's own device of that kind.

        Ranks that were all given one GPU (cuda:0) share it, with collectives through host memory.
        """
        if str(device) == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.device = device
        # It connects with its collectives' deadline, so all should be here when it begins.
        devices = self.members.gather("start", str(device))
        # NCCL refuses two ranks on one device.
        backend = "nccl" if device.type == "cuda" and len(set(devices)) == len(devices) else "gloo"
        if backend == "nccl":  # its watchdog would end this process without a word on who is lost: TeamWatch does that
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        with self.guarded():
            dist.init_process_group(
                backend,
                store=PrefixStore("target", self._store),
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=datetime.timedelta(seconds=self.options.deadline),
                device_id=device if backend == "nccl" else None,
            )
        return device

    def attach(self, bridge: Bridge) -> None:
        """The bridge of this run's slots: from here on a lost rank can be named."""
        self.bridge = bridge
        if self.device.type == "cuda":
            self._watch = TeamWatch(bridge, self.options.deadline)

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as undo:
            if self._watch is not None:
                undo.callback(self._watch.stop)
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        if error is not None:
            if self.bridge is not None and not isinstance(error, BridgeError):  # that is known to the group already
                self.bridge.end(f"{type(error).__name__}: {error}")
            return  # others may be gone, and to leave in order would wait for them
        if not dist.is_initialized():
            return
        # A rank that leaves early takes its connections along while others still read from them.
        with self.guarded():
            dist.barrier()
        dist.destroy_process_group()

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Around each forward of the target, so that a rank that does not come can be named."""
        if self.bridge is not None:
            self.bridge.enter()
        if self._watch is not None:
            self._watch.begin()
        with self.guarded():
            yield

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn the process group's failure into a BridgeError that names the rank at fault, where that can be known."""
        try:
            yield
        except EaglexError:
            raise
        except RuntimeError as error:
            reason = first_line(error) or type(error).__name__
            if not _is_of_the_group(error):
                raise BridgeError(self._end(f"its target failed: {reason}")) from error
            failed = f"a collective of the target failed: {reason}"
            verdict = None if self.bridge is None else self.bridge.verdict()
            said = self._end(failed) if verdict is None else f"{verdict}; seen on rank {self.rank}: {failed}"
            raise BridgeError(said) from error

    def _end(self, why: str) -> str:
        if self.bridge is not None:
            self.bridge.end(why)
        return f"rank {self.rank}: {why}"

    def decide(self, choose: Callable[[], Accepted]) -> Accepted:
        """Rank 0's choice of tokens, for all: equal logits are not taken on trust, and only rank 0 draws.

        At most 64 nodes; one broadcast of 128 numbers.
        """
        words = torch.zeros(1 + 2 * 64, dtype=torch.int64)
        if self.drafts:
            chosen = choose()
            if self.bridge is not None:  # what a rank that has split helped to compute must not get out
                self.bridge.check()
            count = len(chosen.nodes)
            words[0] = count
            words[1 : 1 + count] = torch.tensor(chosen.nodes)
            words[65 : 65 + len(chosen.tokens)] = torch.tensor(chosen.tokens)
        words = words.to(self.device)
        with self.guarded():
            dist.broadcast(words, 0)
        count, *rest = words.tolist()  # waits for the device, so all collectives so far have ended
        if self.bridge is not None:  # one that was aborted, since a rank is lost, leaves anything in its memory
            self.bridge.check()
        if not 0 < count <= 64:
            raise BridgeError(self._end(f"rank 0's choice: expected 1..64 tokens, got {count}"))
        if self._watch is not None:
            self._watch.end()
        return Accepted(nodes=rest[:count], tokens=rest[64 : 64 + count])


def _is_of_the_group(error: RuntimeError) -> bool:
    """Whether the process group failed, rather than this rank's model: gloo has no exception type of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
