"""Ranks of a bridge between GPUs, each a process: what they do, for tests/gpu and for the emulated device."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eaglex.bridge import Bridge, Members
from eaglex.bridge_transport import Results
from eaglex.config import EngineLimits, SpeculationConfig
from eaglex.engine import DraftResults
from eaglex.errors import EaglexError

SPECULATION = SpeculationConfig(num_steps=3, topk=2, num_draft_tokens=7)
LIMITS = EngineLimits(max_batch=5, max_rows=64, num_slots=9)
VOCAB = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a rank is to do; `device` is cuda or emulated."""

    device: str
    transport: str | None = None
    fake_nccl: bool = False  # with the emulated device
    deadline: float = 20.0
    cycles: int = 100
    captured: bool = False
    most_stall: float = 0.0  # seconds of one in ten cycles' stalls, at random, on either side
    limits: EngineLimits = LIMITS
    speculation: SpeculationConfig = SPECULATION
    wrong_length_at: int = -1  # on rank 1, in that cycle
    until_killed: bool = False  # go on for ever
    shared_device: bool = False  # all ranks on device 0
    engine: str = ""  # drafts are a real engine's, which pushes at the end of this call: run or enqueue
    timed: bool = False
    ranks: int = 0  # with a dedicated drafter: of the target; the drafter is the process behind them
    drafter_deadline: float = 5.0
    pooled: bool = False  # its K and V lie in the host's KV slots, and it forgets its table before each request
    drafter_ends: tuple[int, int, str] | None = None  # at that request, by this signal, "before" or "within" it
    drafter_terms: dict[str, int] | None = None  # what it takes the group's terms for
    drafter_late: tuple[int, float] | None = None  # at that request, so many seconds
    drafter_fails_at: int = -1  # its engine, at that request
    rows_late: tuple[int, float] | None = None  # in that cycle rank 0's device has seconds of work in front of them
    ahead_at: int = -1  # rank 0's device rests in that cycle, which is not looked at, until the next was asked for
    rows_deadline: float = 0.0  # so long the drafter waits for them; 0: the deadline
    pause_at: tuple[int, float] | None = None  # rank 0, in front of that cycle; all requests from there on are new ones
    most_lanes: int = 11
    patience: float = 120.0  # seconds for all of it; a hang is found by the deadlines that are tested
    salt: int = 0  # other content than another group's


def device_of(plan: Plan, rank: int) -> torch.device:
    """Where that rank's results are; torch's current device from then on."""
    if plan.device != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", 0 if plan.shared_device else rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class Rank:
    """One rank's side, in its own process."""

    def __init__(self, plan: Plan, members: Members) -> None:
        self.plan, self.rank = plan, members.rank
        self.device = device_of(plan, self.rank)
        self.results = DraftResults.allocate(plan.speculation, plan.limits, self.device)
        begun = time.monotonic()
        self.bridge = Bridge(
            members, plan.speculation, limits=plan.limits, vocab_size=VOCAB, results=self.results,
            deadline=plan.deadline, transport=plan.transport,
        )  # fmt: skip
        self.seconds_to_open = time.monotonic() - begun
        self.terms = self.bridge.invitation().terms
        self.sent = Results(
            self.results.draft_tokens, self.results.parents, self.results.num_nodes, self.results.drafted_for
        )
        self.number = torch.full((), plan.salt, dtype=torch.int64, device=self.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self.slots = torch.arange(1, plan.limits.max_batch + 1).to(self.device)

    def cycle(self) -> None:
        """The next message: other drafts in each, compared on the device."""
        self.number += 1
        expected = Results.pattern(self.terms, self.number, self.device)
        lens = expected.drafted_for[self.slots]
        if self.rank == 0:
            self.sent.copy_(expected)
            self.bridge.push(self.slots, lens, draft=True)
        else:
            self.bridge.receive(self.slots, lens)
        self.wrong += self.sent.differing(expected, self.slots)

    def go(self) -> dict[str, Any]:
        """All cycles; how it went."""
        plan, draw = self.plan, random.Random(self.rank)
        step, graph = self.cycle, None
        if plan.captured:
            torch.cuda.synchronize()  # what was made on the default stream is there
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.stream(stream):
                self.cycle()
                stream.synchronize()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    self.cycle()
            step = graph.replay
        cycle = 0
        while cycle < plan.cycles or plan.until_killed:
            if cycle == plan.wrong_length_at and self.rank == 1:
                self.number += 1
            if plan.most_stall and draw.random() < 0.1:
                self.stall(draw.uniform(0, plan.most_stall), draw.random() < 0.5)
            step()
            cycle += 1
            if graph is not None or plan.until_killed:
                self.bridge.check()
            if cycle % 500 == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.bridge.check()
        found = {
            "wrong": int(self.wrong),
            "number": int(self.number) - plan.salt,
            "counters": self.bridge.counters(),
            "transport": self.bridge.transport,
            "seconds_to_open": self.seconds_to_open,
        }
        self.graph = graph  # alive while the bridge is torn down
        return found

    def stall(self, seconds: float, on_device: bool) -> None:
        if on_device and self.device.type == "cuda":
            torch.cuda._sleep(int(seconds * 1.5e9))
        else:
            time.sleep(seconds)


def rank_of(plan: Plan, store: Any, rank: int, count: int) -> tuple[Any, Members | None]:
    """What this process is, and the ranks it meets at the end."""
    if plan.ranks:
        from support.bridge_relay import DrafterSide, RelayRank

        if rank == plan.ranks:
            return DrafterSide(plan, store), None
        members = Members(store, rank=rank, num_ranks=plan.ranks, deadline=60.0)
        return RelayRank(plan, members, store), members
    members = Members(store, rank=rank, num_ranks=count, deadline=60.0)
    return side_of(plan, members), members


def side_of(plan: Plan, members: Members) -> Any:
    if not plan.engine:
        return Rank(plan, members)
    from support.bridge_engine import EngineRank

    return EngineRank(plan, members)


def _main(rank: int, count: int, store: str, plan: Plan, emulated: str | None, out: Connection) -> None:
    faulthandler.dump_traceback_later(plan.patience, exit=True, file=2)  # says where this rank stands
    if emulated is not None:
        from support import emulated as emulator

        module = emulator.load(Path(emulated))
        if plan.fake_nccl:
            emulator.load_fake_nccl(Path(emulated))
        import eaglex.bridge
        import eaglex.bridge_dedicated
        import eaglex.engine

        for part in (eaglex.bridge, eaglex.bridge_dedicated, eaglex.engine):
            part._extension = lambda: module  # type: ignore[attr-defined]
    begun = time.monotonic()
    try:
        side, members = rank_of(plan, dist.FileStore(store, count), rank, count)
        out.send(("open", side.seconds_to_open))
        found = side.go()
        if members is not None:
            members.gather("end", None)
        begun = time.monotonic()
        with contextlib.suppress(AttributeError):
            del side.bridge
        found["seconds_to_close"] = time.monotonic() - begun
        out.send(("done", found))
    except EaglexError as error:
        out.send(("error", (type(error).__name__, str(error), time.monotonic())))
        out.close()
        os._exit(3)  # a device that hangs must not keep this process
    except Exception:
        out.send(("crash", traceback.format_exc()))
        raise


class World:
    """`count` processes after the same plan. Killed on exit, in whatever state they are."""

    def __init__(self, count: int, plan: Plan, folder: Path, *, emulated: Path | None = None) -> None:
        context: Any = multiprocessing.get_context("fork" if emulated else "forkserver")
        if not emulated:
            context.set_forkserver_preload(["torch", "support.bridge_world"])
        gc.collect()  # an earlier test's bridge has a thread, which a fork would not have: it cannot end there
        store = str(folder / f"store-{random.getrandbits(32)}")
        self.pipes, self.processes, self.patience = [], [], plan.patience
        for rank in range(count):
            here, there = context.Pipe(duplex=False)
            arguments = (rank, count, store, plan, None if emulated is None else str(emulated), there)
            process = context.Process(target=_main, args=arguments)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join(10)

    def hear(self, rank: int, kind: str) -> Any:
        """The next word of that rank, which must be of that kind."""
        pipe = self.pipes[rank]
        assert pipe.poll(self.patience + 5), f"rank {rank} says nothing for {self.patience} s"
        said, value = pipe.recv()
        assert said == kind, f"rank {rank}: expected {kind}, got {said}: {value}"
        return value

    def ended(self, seconds: float = 10.0) -> list[int | None]:
        """Exit codes, once all have ended; None for one that has not."""
        for process in self.processes:
            process.join(seconds)
        return [process.exitcode for process in self.processes]

    def all(self, kind: str) -> list[Any]:
        return [self.hear(rank, kind) for rank in range(len(self.processes))]


@contextlib.contextmanager
def opened(count: int, plan: Plan, folder: Path, emulated: Path | None = None) -> Iterator[World]:
    """A world whose ranks have met."""
    with World(count, plan, folder, emulated=emulated) as world:
        world.all("open")
        yield world
