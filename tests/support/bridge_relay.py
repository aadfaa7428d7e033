"""Two ranks and a dedicated drafter, each a process: rows go from device to device, drafts back, then to all ranks.

Rank 0 has a second engine with the same weights beside it, which says what the drafter must have drafted.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import random
import time
from typing import Any

import torch

from eaglex.bridge import Bridge, Invitation, LinkOptions
from eaglex.bridge_dedicated import RelayClient, RelayServer, join_as_drafter
from eaglex.engine import DraftResults, current_stream
from support.bridge_engine import LAYOUT, LIMITS, SPECULATION, Cycle, digest_of, make_rig, taken
from support.bridge_world import Plan, device_of
from support.models import make_config
from support.streamed import make_streamed_config

JOINED = datetime.timedelta(seconds=60)


def config_of(plan: Plan) -> Any:
    return make_streamed_config() if plan.device == "cuda" else make_config()


class DrafterSide:
    """The drafter's process, the last of the world's. `plan.drafter_ends` is (request, signal, before or within it)."""

    def __init__(self, plan: Plan, store: Any) -> None:
        self.plan = plan
        self.device = device_of(plan, 1)  # rank 1's, so that rows go to another one than rank 0's
        self.seconds_to_open = 0.0
        self.rig = make_rig(plan.device == "cuda")
        store.wait(["invitation"], JOINED)
        invitation = Invitation(**json.loads(store.get("invitation")))
        if plan.drafter_terms:
            engine = self.rig.engine
            rows = plan.drafter_terms.get("max_rows", LIMITS.max_rows)
            engine.limits = dataclasses.replace(engine.limits, max_rows=rows)
            invitation = dataclasses.replace(invitation, terms=invitation.terms | plan.drafter_terms)
        self.server = join_as_drafter(invitation, self.rig.engine)
        assert isinstance(self.server, RelayServer)

    def go(self) -> dict[str, Any]:
        at, number, place = self.plan.drafter_ends or (-1, 0, "")
        requests = 0
        launch = self.rig.engine._engine.run

        class Ending:
            """The engine, with an end in front of its launch."""

            def run(self, batch: Any, stream: int) -> None:
                if requests == at and place == "within":
                    os.kill(os.getpid(), number)
                launch(batch, stream)

        self.rig.engine._engine, kept = Ending(), self.rig.engine._engine
        while True:
            if requests == at and place == "before":
                os.kill(os.getpid(), number)
            try:
                if self.server.serve(0.5):
                    requests += 1
            except Exception:
                self.rig.engine._engine = kept
                return {"requests": requests}


class RelayRank:
    """Rank 0, or one that only receives."""

    def __init__(self, plan: Plan, members: Any, store: Any) -> None:
        self.plan, self.rank = plan, members.rank
        self.device = device_of(plan, self.rank)
        config = config_of(plan)
        self.results = DraftResults.allocate(SPECULATION, LIMITS, self.device)
        self.seconds_to_open = 0.0
        self.bridge = Bridge(
            members, SPECULATION, limits=LIMITS, vocab_size=config.vocab_size, results=self.results,
            deadline=plan.deadline, transport=plan.transport, aux_width=config.num_aux * config.target_hidden_size,
        )  # fmt: skip
        self.lengths = [0] * LAYOUT.num_slots
        self.seen: list[list[torch.Tensor]] = []
        self.right: list[list[torch.Tensor]] = []
        self.warnings: list[str] = []
        self.longest = 0.0
        if self.rank == 0:
            self.rig = make_rig(plan.device == "cuda")
            options = LinkOptions(deadline=plan.drafter_deadline, rejoin_after=0.2)
            self.client = RelayClient(self.bridge, config, options)
            store.set("invitation", json.dumps(dataclasses.asdict(self.client.invitation())))
            until = time.monotonic() + 60
            while not self.client.joined() and time.monotonic() < until:
                time.sleep(0.01)

    def cycle(self, draw: random.Random, *, prompt: bool) -> None:
        cycle = Cycle.drawn(draw, self.lengths, prompt=prompt)
        slots, lens = cycle.slots, cycle.lens
        new_lens = [a + b for a, b in zip(lens, cycle.valid, strict=True)]
        if self.rank == 0:
            batch = cycle.batch(self.rig)
            begun = time.monotonic()
            drafted = self.client.draft(batch, slots=slots, seq_lens=lens, new_lens=new_lens)
            self.bridge.push(slots, new_lens, draft=drafted)
            self.longest = max(self.longest, time.monotonic() - begun)
            self.warnings += self.client.take_warnings()
            self.rig.engine.run(batch, current_stream(self.device))
            self.right.append(taken(self.rig.engine.results, slots))
        else:
            self.bridge.receive(slots, new_lens)
        self.seen.append(taken(self.results, slots))
        cycle.add_to(self.lengths)

    def go(self) -> dict[str, Any]:
        draw = random.Random(5)
        for number in range(self.plan.cycles):
            if max(self.lengths) > 200:
                self.lengths = [0] * LAYOUT.num_slots
            self.cycle(draw, prompt=number % 10 == 0)
            self.bridge.check()
            if self.plan.most_stall:
                time.sleep(draw.uniform(0, self.plan.most_stall))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.bridge.check()
        found = {"digest": digest_of(self.seen)[0], "drafts": digest_of(self.seen)[1]}
        if self.rank == 0:
            # Where there is a draft at all, it is the right one.
            pairs = list(zip(self.seen, self.right, strict=True))
            both = [([t.cpu() for t in seen], [t.cpu() for t in right]) for seen, right in pairs]
            found["wrong"] = sum(wrong_lanes(seen, right) for seen, right in both)
            found["expected"] = digest_of(self.right)[1]
            found |= {"faults": self.client.counters(), "warnings": self.warnings, "longest": self.longest}
        return found


def wrong_lanes(seen: list[torch.Tensor], right: list[torch.Tensor]) -> int:
    count = seen[2]
    counted = torch.arange(seen[0].shape[1]) < count[:, None]
    bad = (count > 0) & (count != right[2])
    for mine, theirs in zip(seen[:2], right[:2], strict=True):
        bad |= ((mine != theirs) & counted).any(1)
    return int(bad.sum())
