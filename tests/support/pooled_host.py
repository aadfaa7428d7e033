"""A host that shares prefixes, with a dedicated drafter whose K and V lie in its KV slots, and what must be drafted.

KV slots are dealt at random, and one that a request gives back is the next that is dealt.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from typing import Any

import torch
import torch.distributed as dist

from eaglex import reference
from eaglex.bridge import Bridge, HostPool, LinkOptions, Members
from eaglex.bridge_dedicated import DrafterClient, DrafterPool, join_as_drafter
from eaglex.config import SpeculationConfig
from eaglex.engine import DraftBatch, DraftEngine, DraftResults
from eaglex.errors import BridgeError
from support.models import make_config
from support.rig import CLEAR, Ask, Layout, Outcome, Request, Rig

SPECULATION = SpeculationConfig(num_steps=3, topk=2, num_draft_tokens=6)
LAYOUT = Layout(num_slots=6, max_batch=5, max_rows=64)
POOL = HostPool(num_kv_slots=220, table_width=64)


class Drafter:
    """The drafter's end, in a thread: its own engine, its own pool, and no table but what comes."""

    def __init__(self, bridge: Bridge, client: DrafterClient, rig: Rig) -> None:
        config = rig.config
        self.pool = DrafterPool.allocate(
            config, POOL, num_slots=LAYOUT.num_slots, dtype=torch.float32, device=torch.device("cpu")
        )
        self.engine = DraftEngine(config, SPECULATION, limits=rig.limits, weights=rig.weights, **vars(self.pool))
        self.server: Any = join_as_drafter(client.invitation(), self.engine, self.pool)
        self.anew: list[bool] = []
        self.deaf, self._resting = threading.Event(), threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            if self.deaf.is_set():
                self._resting.set()
                self._over.wait(0.01)
                continue
            try:
                if self.server.serve(0.05):
                    self.anew.append(bool(self.server._server.anew))
            except BridgeError:
                return

    def deafen(self) -> None:
        """It does not answer until `deaf` is cleared."""
        self._resting.clear()
        self.deaf.set()
        assert self._resting.wait(10)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


class PooledHost:
    """Rank 0 of one. Its rig has the reference of each request, and an engine that is not used."""

    def __init__(self, seed: int, *, deadline: float = 20.0, rejoin_after: float = 0.05) -> None:
        self.rig = Rig(make_config(), SPECULATION, layout=LAYOUT)
        self.choose = random.Random(seed)
        self.table = torch.zeros((LAYOUT.num_slots, POOL.table_width), dtype=torch.int32)
        self.free = list(range(1, POOL.num_kv_slots))
        self.choose.shuffle(self.free)
        self.owned: dict[int, list[int]] = {}  # by request: KV slots that it gives back
        self.rewritten: dict[int, int] = {}  # by request: entries of its row
        self.numbers = 0
        self.compared = self.asked = 0
        config = self.rig.config
        self.results = DraftResults.allocate(SPECULATION, self.rig.limits)
        self.bridge = Bridge(
            Members(dist.HashStore(), rank=0, num_ranks=1, deadline=5.0), SPECULATION, limits=self.rig.limits,
            vocab_size=config.vocab_size, results=self.results, deadline=20.0, pool=POOL,
            aux_width=config.num_aux * config.target_hidden_size,
        )  # fmt: skip
        self.client = DrafterClient(
            self.bridge, config, LinkOptions(deadline=deadline, rejoin_after=rejoin_after), self.table
        )
        self.drafter = Drafter(self.bridge, self.client, self.rig)

    @property
    def running(self) -> dict[int, Request]:
        return self.rig.requests

    def begin(self, *, like: int | None = None, shared: int = 0) -> int:
        """A request in a free slot; its first `shared` tokens are request `like`'s, with that one's K and V."""
        number, self.numbers = self.numbers, self.numbers + 1
        slot = next(s for s in range(1, LAYOUT.num_slots) if s not in {r.slot for r in self.running.values()})
        self.table[slot] = 0
        self.rig.join(number, slot)
        self.owned[number] = []
        if like is not None:
            other = self.running[like]
            mine = self.running[number]
            mine.cache.k[:] = [k[:shared].clone() for k in other.cache.k]
            mine.cache.v[:] = [v[:shared].clone() for v in other.cache.v]
            mine.length = shared
            self.table[slot, :shared] = self.table[other.slot, :shared]
        return number

    def rewrite(self, number: int, like: int, count: int) -> None:
        """The host finds that `like` has the same tokens: that one's KV slots take the place of this one's."""
        mine, other = self.running[number].slot, self.running[like].slot
        self.free += self.table[mine, :count].tolist()
        self.owned[number] = self.owned[number][count:]
        self.table[mine, :count] = self.table[other, :count]
        self.rewritten[number] = count

    def end(self, number: int) -> None:
        del self.rig.requests[number]
        self.free += self.owned.pop(number)
        self.rewritten.pop(number, None)

    def cycle(self, asks: list[Ask], prompts: set[int] = frozenset()) -> list[Outcome]:  # type: ignore[assignment]
        """One cycle of these requests, those in `prompts` with rows of their prompt; what was drafted is compared."""
        locs, lens = [], []
        for ask in asks:
            request, rows = self.running[ask.request], [self.free.pop() for _ in range(ask.rows)]
            end = request.length + ask.count
            self.table[request.slot, request.length : end] = torch.tensor(rows[: ask.count], dtype=torch.int32)
            self.owned[ask.request] += rows[: ask.count]
            locs += rows
            self.free += rows[ask.count :]
            rewritten = self.rewritten.pop(ask.request, 0)
            lens.append(request.length if ask.request in prompts else rewritten)
        batch: DraftBatch = dataclasses.replace(self.rig.batch(list(asks)), out_cache_loc=torch.tensor(locs))
        self.client.draft(batch, begins=[ask.request in prompts for ask in asks], table_lens=lens)
        outcomes = [self.rig._expect(ask) for ask in asks]
        return outcomes

    def has(self, outcome: Outcome) -> bool:
        """Whether there is a draft for this request's length."""
        slot = outcome.slot
        return int(self.results.num_nodes[slot]) > 0 and int(self.results.drafted_for[slot]) == outcome.new_len

    def compare(self, outcomes: list[Outcome]) -> None:
        """Every one of them was drafted for, as the reference drafts for that request alone."""
        for outcome in outcomes:
            assert self.has(outcome), outcome.request
            if outcome.margin < CLEAR:
                continue
            assert self.same(outcome), outcome.request
            self.compared += 1

    def same(self, outcome: Outcome) -> bool:
        slot, n = outcome.slot, int(self.results.num_nodes[outcome.slot])
        drafted: reference.Draft = outcome.drafted
        return (
            self.results.draft_tokens[slot, :n].tolist() == drafted.tokens.tolist()
            and self.results.parents[slot, :n].tolist() == drafted.parents.tolist()
        )

    def close(self) -> None:
        self.drafter.end()
