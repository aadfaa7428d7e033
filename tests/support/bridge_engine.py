"""Rank 0 with a real engine whose cycles end with the push, and ranks that only receive: what each has is compared."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import statistics
from typing import Any

import torch

from eaglex.bridge import Bridge, Members
from eaglex.config import EngineLimits, SpeculationConfig
from eaglex.engine import DraftBatch, DraftEngine, DraftResults, current_stream
from support.bridge_world import Plan, device_of
from support.models import make_config
from support.rig import Ask, Layout, Rig
from support.streamed import StreamedRig, make_streamed_config

SPECULATION = SpeculationConfig(num_steps=3, topk=2, num_draft_tokens=7)
LAYOUT = Layout(num_slots=14, max_batch=11, max_rows=128)
LIMITS = EngineLimits(max_batch=LAYOUT.max_batch, max_rows=LAYOUT.max_rows, num_slots=LAYOUT.num_slots)
PROMPT = 60  # rows of a first cycle: more than any graph takes, so raw launches


def make_rig(cuda: bool) -> Rig:
    kind, config = (StreamedRig, make_streamed_config()) if cuda else (Rig, make_config())
    return kind(config, SPECULATION, layout=LAYOUT)


def joined(seen: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Tokens, parents, counts and lengths of all these cycles, one behind the other, in host memory."""
    return [torch.cat(parts).cpu() for parts in zip(*seen, strict=True)]


def digest_of(tokens: torch.Tensor, parents: torch.Tensor, counts: torch.Tensor, lens: torch.Tensor) -> tuple[str, int]:
    """Of all that counts of these drafts, and how many of them there are."""
    digest = hashlib.sha256()
    counted = torch.arange(tokens.shape[1]) < counts[:, None]
    for tensor in (tokens.where(counted, 0), parents.where(counted, 0), counts, lens):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest(), int((counts > 0).sum())


@dataclasses.dataclass
class Cycle:
    """Some requests' rows, how many of those count, and lengths before them: the same ones on every rank."""

    slots: list[int]
    rows: list[int]
    valid: list[int]
    lens: list[int]

    @classmethod
    def drawn(cls, draw: random.Random, lengths: list[int], *, prompt: bool, most: int = LAYOUT.max_batch) -> Cycle:
        count = 2 if prompt else draw.randint(1, most)
        slots = draw.sample(range(1, LAYOUT.num_slots), count)
        rows = [PROMPT if prompt else draw.randint(1, 7) for _ in slots]
        valid = [draw.randint(1, most) for most in rows]
        return cls(slots, rows, valid, [lengths[slot] for slot in slots])

    def batch(self, rig: Rig) -> DraftBatch:
        for slot, length in zip(self.slots, self.lens, strict=True):
            if slot not in rig.requests:
                rig.join(slot, slot)
            rig.requests[slot].length = length
        return rig.batch([Ask(slot, n, v) for slot, n, v in zip(self.slots, self.rows, self.valid, strict=True)])

    def add_to(self, lengths: list[int]) -> None:
        for slot, n in zip(self.slots, self.valid, strict=True):
            lengths[slot] += n


def taken(results: DraftResults, slots: list[int]) -> list[torch.Tensor]:
    at = torch.tensor(slots, device=results.num_nodes.device)
    return [t[at] for t in (results.draft_tokens, results.parents, results.num_nodes, results.drafted_for)]


class EngineRank:
    """`plan.engine` is the engine's call: run, or enqueue."""

    def __init__(self, plan: Plan, members: Members) -> None:
        self.plan, self.rank = plan, members.rank
        self.device = device_of(plan, self.rank)
        cuda = self.device.type == "cuda"
        self.rig = make_rig(cuda) if self.rank == 0 else None
        if self.rig is not None:
            self.results = self.rig.engine.results
        else:
            self.results = DraftResults.allocate(SPECULATION, LIMITS, self.device)
        self.seconds_to_open = 0.0
        self.bridge = Bridge(
            members, SPECULATION, limits=LIMITS, vocab_size=make_streamed_config().vocab_size,
            results=self.results, deadline=plan.deadline, transport=plan.transport,
        )  # fmt: skip
        if self.rig is not None:
            self.bridge.push_from(self.rig.engine)
            self.rig.engine.warm_up()
        self.lengths = [0] * LAYOUT.num_slots
        self.seen: list[list[torch.Tensor]] = []

    def cycle(self, draw: random.Random, *, prompt: bool) -> None:
        """What this rank has of the cycle's requests afterwards."""
        cycle = Cycle.drawn(draw, self.lengths, prompt=prompt)
        if self.rig is not None:
            self.launch(self.rig.engine, cycle.batch(self.rig))
        else:
            ids = [torch.tensor(values, device=self.device) for values in (cycle.slots, cycle.lens)]
            self.bridge.receive(*ids, num_valid=torch.tensor(cycle.valid, dtype=torch.int32, device=self.device))
        cycle.add_to(self.lengths)
        self.seen.append(taken(self.results, cycle.slots))

    def launch(self, engine: DraftEngine, batch: DraftBatch) -> None:
        (engine.run if self.plan.engine == "run" else engine.enqueue)(batch, current_stream(self.device))

    def go(self) -> dict[str, Any]:
        draw = random.Random(5)
        for number in range(self.plan.cycles):
            if max(self.lengths) > 300:
                self.lengths = [0] * LAYOUT.num_slots
            self.cycle(draw, prompt=number % 10 == 0)
            if number % 7 == 0:
                self.bridge.check()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.bridge.check()
        digest, drafts = digest_of(*joined(self.seen))
        found = {"digest": digest, "drafts": drafts, "counters": self.bridge.counters()}
        if self.device.type == "cuda" and self.plan.timed:
            found["us"] = self.times()
        return found

    def times(self) -> dict[str, float]:
        """Microseconds of one cycle on rank 0's stream, with and without the push in its graph; batch 8."""
        slots, lens = list(range(1, 9)), [100] * 8
        rounds, each = 60, 5
        if self.rig is None:
            ids = [torch.tensor(values, device=self.device) for values in (slots, lens)]
            valid = torch.full((8,), 3, dtype=torch.int32, device=self.device)
            for number in range(rounds * each):
                self.bridge.receive(*ids, num_valid=valid)
                if number % 100 == 99:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            self.bridge.check()
            return {}
        plain = StreamedRig(make_streamed_config(), SPECULATION, layout=LAYOUT)
        plain.engine.warm_up()
        found: dict[str, list[float]] = {"with": [], "without": []}
        for rig in (self.rig, plain):
            for slot in slots:
                rig.join(slot, slot)
                rig.requests[slot].length = 100
        batches = [rig.batch([Ask(slot, 7, 3) for slot in slots]) for rig in (self.rig, plain)]
        stream = torch.cuda.current_stream()
        for _ in range(rounds):
            for name, rig, batch in zip(("with", "without"), (self.rig, plain), batches, strict=True):
                events = [torch.cuda.Event(enable_timing=True) for _ in range(each + 1)]
                torch.cuda._sleep(600_000)  # the host gets ahead
                events[0].record(stream)
                for event in events[1:]:
                    rig.engine.run(batch, stream.cuda_stream)  # type: ignore[arg-type]
                    event.record(stream)
                torch.cuda.synchronize()
                found[name] += [a.elapsed_time(b) * 1e3 for a, b in zip(events[1:], events[2:], strict=False)]
        return {name: statistics.median(times) for name, times in found.items()}
