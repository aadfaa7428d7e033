"""Random schedules of requests through two engines at once: their drafts must be the same, cycle by cycle."""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

from eaglex import reference
from eaglex.config import MaskMode
from eaglex.engine import VerifyTensors
from eaglex.weights import DraftWeights
from support.judge import Judge, Side
from support.margin import recorded
from support.rig import CLEAR, Ask, Rig


@dataclasses.dataclass
class Tally:
    """What a soak has seen; its test asserts that each kind of event happened."""

    cycles: int = 0
    drafts: int = 0
    joins: int = 0
    leaves: int = 0
    pads: int = 0
    stops: int = 0
    unclear: int = 0  # drafts whose ids differ because the reference's own decision was within rounding


class Soak:
    """`subject` shares requests, table and weights with `oracle` (Rig's `share`), but not its KV pool.

    Requests join with a prompt in chunks, decode with random accept lengths, leave, and give slot and pages to others;
    batches grow, shrink and are padded anywhere. Where ids differ, the request's whole history is replayed through the
    float64 reference: only a decision closer than float32's rounding excuses it.
    """

    def __init__(self, oracle: Rig, subject: Rig, seed: int) -> None:
        self.oracle, self.subject = oracle, subject
        self.random = random.Random(seed)
        self.tally = Tally()
        self.history: dict[int, list[Ask]] = {}
        self.free = list(range(1, oracle.layout.num_slots))
        self.next_request = 0

    def cycle(self) -> None:
        """One batch through both engines, `tree` for its slots in another order, and the comparison."""
        asks = self._asks()
        for rig in (self.oracle, self.subject):
            run = rig.engine.run if self.random.random() < 0.8 else rig.engine.enqueue
            run(rig.batch(asks))
        present = [ask for ask in asks if ask is not None]
        for ask in present:
            self.oracle.requests[ask.request].length += ask.count
            self.history[ask.request].append(ask)
        same = [ask for ask in present if self._same(ask)]
        self._compare_trees(same)
        self.tally.cycles += 1
        self.tally.pads += len(asks) - len(present)

    # --------------------------------------------------------------------------------------------------- the schedule

    def _asks(self) -> list[Ask | None]:
        layout, roll = self.oracle.layout, self.random
        while self.free and roll.random() < 0.4:
            self._join()
        for request in list(self.history):
            full = self.oracle.requests[request].length > self.oracle.config.max_positions - 60
            if full or (len(self.history[request]) > 1 and roll.random() < 0.03):
                self._leave(request)
        waiting = roll.sample(list(self.history), len(self.history))
        asks: list[Ask | None] = [self._ask(r) for r in waiting[: roll.randint(1, layout.max_batch)]]
        while len(asks) < layout.max_batch and (not asks or roll.random() < 0.3):
            asks.insert(roll.randint(0, len(asks)), None)
        return asks

    def _ask(self, request: int) -> Ask:
        if len(self.history[request]) < request % 3:  # some prompts come in pieces
            return Ask(request, self.random.randint(1, 12), draft_from=False)
        if len(self.history[request]) == request % 3:
            return Ask(request, self.random.randint(1, 12))
        nodes = self.oracle.speculation.num_draft_tokens
        return Ask(request, nodes, self.random.randint(1, nodes))

    def _join(self) -> None:
        roll, table = self.random, self.oracle.table
        slot = self.free.pop(roll.randrange(len(self.free)))
        if self.free:  # pages change hands as well
            other = roll.choice(self.free)
            table[[slot, other]] = table[[other, slot]]
        self.oracle.join(self.next_request, slot)
        self.history[self.next_request] = []
        self.next_request += 1
        self.tally.joins += 1

    def _leave(self, request: int) -> None:
        self.free.append(self.oracle.requests.pop(request).slot)
        del self.history[request]
        self.tally.leaves += 1

    # ------------------------------------------------------------------------------------------------- the comparison

    def _both(self, ask: Ask) -> tuple[reference.Draft, reference.Draft, bool]:
        """What the subject and the oracle drafted, for the same length, and whether it is the same tree."""
        slot, length = self.oracle.requests[ask.request].slot, self.oracle.requests[ask.request].length
        mine, theirs = (rig.results for rig in (self.subject, self.oracle))
        assert int(mine.drafted_for[slot]) == int(theirs.drafted_for[slot]) == length
        a, b = self.subject.drafted(slot), self.oracle.drafted(slot)
        self.tally.drafts += len(b.tokens) > 0
        self.tally.stops += 0 < len(b.tokens) < self.oracle.speculation.num_draft_tokens - 1
        return a, b, a.tokens.tolist() == b.tokens.tolist() and a.parents.tolist() == b.parents.tolist()

    def _same(self, ask: Ask) -> bool:
        a, b, same = self._both(ask)
        if same:
            torch.testing.assert_close(a.scores, b.scores, rtol=0, atol=1e-3)
            return True
        margin = self._margin(ask.request)
        assert margin < CLEAR, f"{ask.request}, {self.oracle.requests[ask.request]}: {a} against {b}, margin {margin}"
        self.tally.unclear += 1
        return False

    def _margin(self, request: int) -> float:
        """By how much the reference decides what this request's last cycle drafted."""
        cache, logits, hidden = self._replay(request, self.oracle.wide)
        with recorded() as margin:
            reference.draft(self.oracle.config, self.oracle.wide, cache, logits, hidden, self.oracle.speculation)
        return margin.gap

    def _replay(self, request: int, weights: DraftWeights) -> tuple[reference.DraftCache, Tensor, Tensor]:
        """The request's whole history through the reference, in these weights' type: cache, logits and hidden."""
        config, dtype = self.oracle.config, weights.fc.dtype
        held = self.oracle.requests[request]
        cache, length = reference.DraftCache.empty(config, dtype), held.length
        held.length = 0
        for ask in self.history[request]:
            aux, ids = self.oracle.rows_of(ask)
            logits, hidden = reference.extend(config, weights, cache, aux[: ask.count].to(dtype), ids[: ask.count])
            held.length += ask.count
        assert held.length == length
        return cache, logits, hidden

    def _compare_trees(self, asks: list[Ask]) -> None:
        if not asks:
            return
        order = self.random.sample(asks, len(asks))
        slots = torch.tensor([self.oracle.requests[ask.request].slot for ask in order])
        lens = torch.tensor([self.oracle.requests[ask.request].length for ask in order])
        bonus = torch.tensor([self.random.randrange(self.oracle.config.vocab_size) for _ in order])
        nodes, mode = self.oracle.speculation.num_draft_tokens, self.random.choice(list(MaskMode))
        filled = []
        for rig in (self.oracle, self.subject):
            device = rig.engine.device
            out = VerifyTensors.allocate(len(order), nodes, mode, device, total_length=int(lens.sum()))
            rig.engine.tree(out, req_pool_indices=slots.to(device), seq_lens=lens.to(device),
                            bonus_tokens=bonus.to(device))
            filled.append(out)
        for name in ("draft_tokens", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling",
                     "mask"):
            theirs, mine = (getattr(out, name).cpu() for out in filled)
            assert torch.equal(mine, theirs), name


class JudgedSoak(Soak):
    """Two engines in 16 bits (the fast chain against the plain one): where they went different ways at a near tie, and
    for one draft in ten anyway, the subject's draft is judged by float64 along its own path.
    """

    ROUNDING = 0.16  # two engines' scores that are further apart say that one of them is to be judged

    def __init__(self, oracle: Rig, subject: Rig, seed: int) -> None:
        super().__init__(oracle, subject, seed)
        self.judge = Judge(oracle.config, oracle.speculation)

    def _same(self, ask: Ask) -> bool:
        a, b, same = self._both(ask)
        close = same and bool(((a.scores - b.scores).abs() < self.ROUNDING).all())
        if len(a.tokens) != len(b.tokens):  # only a stop within rounding of the threshold
            assert self._margin(ask.request) < self.ROUNDING, f"request {ask.request}: {a} against {b}"
        if len(a.tokens) and (not close or self.random.random() < 0.1):
            sides = [Side(weights, *self._replay(ask.request, weights))
                     for weights in (self.oracle.wide, self.oracle.weights)]
            self.judge.take(a, *sides)
            self.judge.check_choices()
            self.judge.check()
        self.tally.unclear += not same
        return same
