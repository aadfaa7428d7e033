"""Two ranks and a dedicated drafter, each a process: rows go from device to device, drafts back, then to all ranks.

Rank 0 has a second engine with the same weights beside it, which says what the drafter must have drafted. With
transport shm all of it goes through host memory, and the drafter alone is on the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import json
import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from eaglex.bridge import Bridge, HostPool, Invitation, LinkOptions
from eaglex.bridge_dedicated import DrafterClient, DrafterPool, RelayClient, RelayServer, join_as_drafter
from eaglex.engine import DraftBatch, DraftResults, current_stream
from eaglex.errors import BridgeError, DeviceError
from support import emulated
from support.bridge_engine import LAYOUT, LIMITS, SPECULATION, Cycle, digest_of, joined, make_rig, taken
from support.bridge_world import Plan, device_of
from support.models import make_config
from support.streamed import make_streamed_config

JOINED = datetime.timedelta(seconds=60)


def pool_of(config: Any) -> HostPool:
    """That of a rig, which is the host's."""
    context = config.max_positions
    return HostPool(num_kv_slots=LAYOUT.num_slots * context + 3, table_width=context)


def table_of(rig: Any) -> torch.Tensor:
    """Where the engine reads it, which on a GPU is not the rig's own."""
    found: torch.Tensor = getattr(rig, "_table", rig.table)
    return found


def config_of(plan: Plan) -> Any:
    return make_streamed_config() if plan.device == "cuda" else make_config()


class DrafterSide:
    """The drafter's process, the last of the world's. `plan.drafter_ends` is (request, signal, before or within it)."""

    def __init__(self, plan: Plan, store: Any) -> None:
        self.plan = plan
        self.device = device_of(plan, 1)  # rank 1's, so that rows go to another one than rank 0's
        self.seconds_to_open = 0.0
        self.requests = 0
        self.rig = make_rig(plan.device == "cuda")
        store.wait(["invitation"], JOINED)
        invitation = Invitation(**json.loads(store.get("invitation")))
        if plan.drafter_terms:
            engine = self.rig.engine
            rows = plan.drafter_terms.get("max_rows", LIMITS.max_rows)
            engine.limits = dataclasses.replace(engine.limits, max_rows=rows)
            invitation = dataclasses.replace(invitation, terms=invitation.terms | plan.drafter_terms)
        rig = self.rig
        k, v = getattr(rig, "_pool", (rig.draft_k, rig.draft_v))
        self.pool = DrafterPool(req_to_token=table_of(rig), draft_k=k, draft_v=v)
        self.forget()
        self.server = join_as_drafter(invitation, rig.engine, self.pool if plan.pooled else None)
        assert isinstance(self.server, RelayServer) == (plan.transport != "shm")

    def go(self) -> dict[str, Any]:
        engine, plan = self.rig.engine, self.plan
        kept = engine._engine
        engine._engine = _Faulty(kept.run, lambda: self.requests, plan)  # type: ignore[assignment]
        try:
            while True:
                self._end_if("before")
                self.forget()
                if self.server.serve(0.5):
                    self.requests += 1
        except BridgeError:  # rank 0 has ended
            engine._engine = kept
            return {"requests": self.requests}

    def forget(self) -> None:
        """All that its table says is what comes with a request."""
        if self.plan.pooled:
            self.pool.req_to_token.fill_(-1)

    def _end_if(self, place: str) -> None:
        end_if(self.plan, self.requests, place)


def end_if(plan: Plan, requests: int, place: str) -> None:
    if plan.drafter_ends is not None and (requests, place) == (plan.drafter_ends[0], plan.drafter_ends[2]):
        os.kill(os.getpid(), plan.drafter_ends[1])


class _Faulty:
    """The drafter's engine, and in front of its launch what the plan has for that request."""

    def __init__(self, launch: Callable[[Any, int], None], requests: Callable[[], int], plan: Plan) -> None:
        self._launch, self._requests, self._plan = launch, requests, plan

    def run(self, batch: Any, stream: int) -> None:
        at, plan = self._requests(), self._plan
        end_if(plan, at, "within")
        if plan.drafter_late is not None and plan.drafter_late[0] == at:
            time.sleep(plan.drafter_late[1])
        if plan.drafter_fails_at == at:
            raise DeviceError("the engine of this test fails here")
        self._launch(batch, stream)


class _Graphs:
    """The bridge's calls captured, a graph for each number of lanes."""

    def __init__(self, call: Callable[[torch.Tensor, torch.Tensor], None], device: torch.device) -> None:
        self._call, self._device = call, device
        self._made: dict[int, tuple[torch.Tensor, torch.cuda.CUDAGraph]] = {}

    def __call__(self, slots: list[int], new_lens: list[int]) -> None:
        if len(slots) not in self._made:
            lanes, graph = torch.zeros(2, len(slots), dtype=torch.int64, device=self._device), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._call(lanes[0], lanes[1])
            self._made[len(slots)] = lanes, graph
        lanes, graph = self._made[len(slots)]
        lanes.copy_(torch.tensor([slots, new_lens]))
        graph.replay()


class RelayRank:
    """Rank 0, or one that only receives."""

    def __init__(self, plan: Plan, members: Any, store: Any) -> None:
        self.plan, self.rank = plan, members.rank
        self.device = device_of(plan, self.rank)
        here = torch.device("cpu") if plan.transport == "shm" else self.device
        config = config_of(plan)
        self.results = DraftResults.allocate(SPECULATION, LIMITS, here)
        self.seconds_to_open = 0.0
        self.bridge = Bridge(
            members, SPECULATION, limits=LIMITS, vocab_size=config.vocab_size, results=self.results,
            deadline=plan.deadline, transport=plan.transport, aux_width=config.num_aux * config.target_hidden_size,
            pool=pool_of(config) if plan.pooled else None,
        )  # fmt: skip
        self.push = lambda slots, lens: self.bridge.push(slots, lens, draft=True)
        self.receive = lambda slots, lens: self.bridge.receive(slots, lens)
        if plan.captured:
            self.push, self.receive = _Graphs(self.push, here), _Graphs(self.receive, here)
        self.lengths = [0] * LAYOUT.num_slots
        self.seen: list[list[torch.Tensor]] = []
        self.right: list[list[torch.Tensor]] = []
        self.warnings: list[str] = []
        self.longest = 0.0
        self._hold = contextlib.ExitStack()
        if self.rank == 0:
            self.bridge.deadline = plan.rows_deadline or plan.deadline
            self.rig = make_rig(plan.device == "cuda")
            options = LinkOptions(deadline=plan.drafter_deadline, rejoin_after=0.2)
            kind: Any = DrafterClient if plan.transport == "shm" else RelayClient
            table = self.rig.table if plan.transport == "shm" else table_of(self.rig)
            self.client = kind(self.bridge, config, options, table if plan.pooled else None)
            store.set("invitation", json.dumps(dataclasses.asdict(self.client.invitation())))
            until = time.monotonic() + 60
            while not self.client.joined() and time.monotonic() < until:
                time.sleep(0.01)

    def cycle(self, draw: random.Random, *, prompt: bool, seen: bool = True) -> None:
        cycle = Cycle.drawn(draw, self.lengths, prompt=prompt, most=self.plan.most_lanes)
        slots, lens = cycle.slots, cycle.lens
        new_lens = [a + b for a, b in zip(lens, cycle.valid, strict=True)]
        if self.rank == 0:
            batch = cycle.batch(self.rig)
            begun = time.monotonic()
            if self.asked_late(batch, slots, lens, new_lens):
                self.push(slots, new_lens)
            else:
                self.bridge.push(slots, new_lens, draft=False)
            if seen:
                self._released()
            self.longest = max(self.longest, time.monotonic() - begun)
            self.warnings += self.client.take_warnings()
            self.rig.engine.run(batch, current_stream(self.device))
            if seen:
                self.right.append(taken(self.rig.engine.results, slots))
        else:
            self.receive(slots, new_lens)
        if seen:
            self.seen.append(taken(self.results, slots))
        cycle.add_to(self.lengths)

    def _held(self) -> None:
        """The device's next work waits: until `_released`, where it is emulated."""
        if self.rank == 0 and self.plan.device == "cuda":
            torch.cuda._sleep(int(0.3 * 2e9))
        elif self.rank == 0:
            self._hold.enter_context(emulated.held(ctypes.CDLL(self.bridge._binary.__file__)))

    def _released(self) -> None:
        self._hold.close()

    def asked_late(self, batch: DraftBatch, slots: list[int], lens: list[int], new_lens: list[int]) -> bool:
        """`ask`, by the plan behind work that takes the device a while, as the target's forward may."""
        late = self.plan.rows_late
        if late is None or late[0] != len(self.seen):
            return self.ask(batch, slots, lens, new_lens)
        if self.plan.device == "cuda":
            torch.cuda._sleep(int(late[1] * 2e9))  # cycles of at most 2 GHz
            return self.ask(batch, slots, lens, new_lens)
        with emulated.held(ctypes.CDLL(self.bridge._binary.__file__)):
            drafted = self.ask(batch, slots, lens, new_lens)
            time.sleep(late[1])
        return drafted

    def ask(self, batch: DraftBatch, slots: list[int], lens: list[int], new_lens: list[int]) -> bool:
        begins = [length == 0 for length in lens]
        if self.plan.pooled:
            ends = batch.row_start.tolist()
            rows = [ends[i + 1] - ends[i] for i in range(len(slots))]
            places = [self.rig.table[s, n : n + r] for s, n, r in zip(slots, lens, rows, strict=True)]
            batch = dataclasses.replace(batch, out_cache_loc=torch.cat(places).long().to(self.device))
        if isinstance(self.client, RelayClient) and self.plan.pooled:
            return self.client.draft(batch, slots=slots, begins=begins, rewritten=[True] * len(slots))
        if isinstance(self.client, RelayClient):
            return self.client.draft(batch, slots=slots, seq_lens=lens, new_lens=new_lens)
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        on_host = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
        pooled = {"begins": begins, "table_lens": lens} if self.plan.pooled else {}
        return bool(self.client.draft(DraftBatch(**on_host), **pooled))

    def go(self) -> dict[str, Any]:
        draw = random.Random(5)
        stalls = random.Random(self.rank)  # of its own: what is drawn must be the same on all ranks
        for number in range(self.plan.cycles):
            if self.plan.pause_at is not None and number == self.plan.pause_at[0]:
                self.lengths = [0] * LAYOUT.num_slots
                time.sleep(self.plan.pause_at[1] if self.rank == 0 else 0)
            if max(self.lengths) > 200:
                self.lengths = [0] * LAYOUT.num_slots
            if number == self.plan.ahead_at:
                self._held()
            self.cycle(draw, prompt=number % 10 == 0, seen=number != self.plan.ahead_at)
            self.bridge.check()
            if self.plan.most_stall and stalls.random() < 0.1:
                time.sleep(stalls.uniform(0, self.plan.most_stall))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.bridge.check()
        seen = joined(self.seen)
        digest, drafts = digest_of(*seen)
        found: dict[str, Any] = {"digest": digest, "drafts": drafts, "last": int((self.seen[-1][2] > 0).sum())}
        if self.rank == 0:
            # Where there is a draft at all, it is the right one.
            right = joined(self.right)
            found |= {"wrong": wrong_lanes(seen, right), "expected": digest_of(*right)[1]}
            found |= {"faults": self.client.counters(), "warnings": self.warnings, "longest": self.longest}
        return found


def wrong_lanes(seen: list[torch.Tensor], right: list[torch.Tensor]) -> int:
    count = seen[2]
    counted = torch.arange(seen[0].shape[1]) < count[:, None]
    bad = (count > 0) & (count != right[2])
    for mine, theirs in zip(seen[:2], right[:2], strict=True):
        bad |= ((mine != theirs) & counted).any(1)
    return int(bad.sum())
