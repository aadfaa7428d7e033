"""Rank 0 with a real engine whose cycles end with the push, and ranks that only receive: what each has is compared."""

from __future__ import annotations

import hashlib
import random
import statistics
from typing import Any

import torch

from eaglex.bridge import Bridge, Members
from eaglex.config import EngineLimits, SpeculationConfig
from eaglex.engine import DraftBatch, DraftEngine, DraftResults
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
        """Some requests' rows, the same ones on every rank; what this rank has of them afterwards."""
        count = 2 if prompt else draw.randint(1, LAYOUT.max_batch)
        slots = draw.sample(range(1, LAYOUT.num_slots), count)
        rows = [PROMPT if prompt else draw.randint(1, 7) for _ in slots]
        valid = [draw.randint(1, most) for most in rows]
        lens = [self.lengths[slot] for slot in slots]
        if self.rig is not None:
            asks = [Ask(slot, n, v) for slot, n, v in zip(slots, rows, valid, strict=True)]
            for slot, length in zip(slots, lens, strict=True):
                if slot not in self.rig.requests:
                    self.rig.join(slot, slot)
                self.rig.requests[slot].length = length
            self.launch(self.rig.engine, self.rig.batch(asks))  # type: ignore[arg-type]
        else:
            ids = [torch.tensor(values, device=self.device) for values in (slots, lens)]
            self.bridge.receive(*ids, num_valid=torch.tensor(valid, dtype=torch.int32, device=self.device))
        for slot, count in zip(slots, valid, strict=True):
            self.lengths[slot] += count
        at = torch.tensor(slots, device=self.device)
        found = self.results
        self.seen.append([t[at] for t in (found.draft_tokens, found.parents, found.num_nodes, found.drafted_for)])

    def launch(self, engine: DraftEngine, batch: DraftBatch) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0
        (engine.run if self.plan.engine == "run" else engine.enqueue)(batch, stream)

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
        digest, drafts = hashlib.sha256(), 0
        for tokens, parents, counts, lens in (([t.cpu() for t in one]) for one in self.seen):
            counted = torch.arange(tokens.shape[1]) < counts[:, None]
            for tensor in (tokens.where(counted, 0), parents.where(counted, 0), counts, lens):
                digest.update(tensor.contiguous().numpy().tobytes())
            drafts += int((counts > 0).sum())
        found = {"digest": digest.hexdigest(), "drafts": drafts, "counters": self.bridge.counters()}
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
