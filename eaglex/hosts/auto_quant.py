"""`--draft-quant auto`: the precision of each part, by measured time and agreement, with the figures behind it.

Every part is measured alone in FP8 and in INT4, a head in INT4 with its best scored again. Seconds add up over parts,
since kernels run one after another, and so do lost agreements (docs/precision.md); the best recipe by those sums is
then measured itself, beside `fp8` and `int4`, and the best measured one is taken. A recipe's score is tokens per second
at batch 1,

    (1 + a + a² + … + a^K) / (verification + cycle),    a = accept · (1 - loss · (1 - same best token))

where `accept` is what makes the first sum the accept length that the stored draft has on the text, drafted from every
row, and `loss` what a best token that differs costs: most that differ were as likely to be refused before.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eaglex import reference
from eaglex.config import DraftConfig, Sampling, SpeculationConfig
from eaglex.engine import current_stream
from eaglex.hosts.calibration import CalibrationText, agreed
from eaglex.hosts.draft_slots import DraftRows, DraftSlots, batch_of, to_device
from eaglex.packed import DraftQuant, PackedWeight, Part, Precision, part_of, rescored
from eaglex.quantize import quantize

if TYPE_CHECKING:
    from eaglex.weights import DraftWeights

# Without a target's text. The loss is what models/tiny showed for INT4 in all parts, the most of all recipes.
ACCEPT, LOSS = 0.75, 0.2
VERIFY_CYCLES = 4.0  # and a verification then counts as that many cycles of the unquantised draft
SECONDS = 20.0  # behind this no further part is measured, so that a start stays bounded
NEAR = 0.005  # scores closer than this, or than two runs of one draft, are equal: what agrees most is taken
# A recipe is timed for 0.4 s, at most 12 rounds of 3 to 50 cycles: so many that waiting for the device, which costs as
# much as a hundredth of a millisecond, is shared by some milliseconds.
_ROUNDS, _CYCLES, _MOST_CYCLES, _ROUND_SECONDS, _LEAST_ROUND = 12, 3, 50, 0.4, 0.01
_DRAFT_SECONDS = 2.0  # for drafts from the text's rows
_LOW = (Precision.FP8, Precision.INT4)
_READ_BY_STEPS = ("norm", "lm_head")  # and the layers; fc once per cycle, of the embedding a row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One recipe: bytes and seconds of a cycle at batch 1, the share of rows whose best token is the stored draft's."""

    quant: DraftQuant
    nbytes: int
    seconds: float
    same_best: float
    accept: float | None  # share of rows whose best token is the target's; None where no target is at hand


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """How seconds and agreement become tokens per second."""

    num_steps: int
    verify_seconds: float
    accept: float
    loss: float
    near: float = NEAR  # scores that differ by this share are equal

    def accept_length(self, same_best: float) -> float:
        """Estimated, of a chain of `num_steps`, the bonus token counted."""
        a = self.accept * (1 - self.loss * (1 - same_best))
        return sum(a**i for i in range(self.num_steps + 1))

    def rate(self, seconds: float, same_best: float) -> float:
        """Tokens per second at batch 1."""
        return self.accept_length(same_best) / (self.verify_seconds + seconds)

    def of(self, measured: Measured) -> float:
        """The same for a recipe that was measured."""
        return self.rate(measured.seconds, measured.same_best)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The recipe, and the lines that say what it was chosen by."""

    quant: DraftQuant
    lines: tuple[str, ...]


def choose(
    config: DraftConfig,
    weights: DraftWeights,
    speculation: SpeculationConfig,
    *,
    text: CalibrationText,
    device: torch.device,
) -> Choice:
    """Measure and choose, on `device`: about ten engines one after another, each for a fraction of a second.

    Parts that the checkpoint has packed stay as they are. The device must hold the weights twice and those of one
    quantised draft. Raises ConfigError and DeviceError as the engine does.
    """
    bench = _Bench(config, to_device(weights, device), speculation, text, device)
    begun = time.perf_counter()
    stored = bench.measure(DraftQuant())
    alone: dict[tuple[Part, Precision], Measured] = {}
    parts = _plain_parts(weights)
    left = [(part, precision) for part in parts for precision in _LOW if _fits(weights, part, precision)]
    whole = len(left) == len(Part) * len(_LOW)
    while left and time.perf_counter() - begun < SECONDS:
        part, precision = left.pop(0)
        alone[part, precision] = bench.measure(DraftQuant(**{part.value: precision}))
    again = bench.measure(DraftQuant()).seconds
    apart, stored = abs(again - stored.seconds), dataclasses.replace(stored, seconds=min(again, stored.seconds))
    score = _score(stored, list(alone.values()), text, _Known(speculation.num_steps, bench.accept_length(), apart))
    wanted = [_best_sum(stored, alone, score)]
    if whole and not left:
        wanted += [DraftQuant.parse(word.value) for word in _LOW]
    found = [stored, *alone.values()]
    for quant in wanted:
        if all(quant != measured.quant for measured in found):
            found.append(bench.measure(quant))
    chosen = _first_of_equals(found, score)
    skipped = [f"{part.value}={precision.value}" for part, precision in left]
    return Choice(quant=chosen.quant, lines=tuple(_lines(found, chosen, score, text, skipped)))


class _Bench:
    """Measures recipes of one draft on one text."""

    def __init__(
        self,
        config: DraftConfig,
        weights: DraftWeights,
        speculation: SpeculationConfig,
        text: CalibrationText,
        device: torch.device,
    ) -> None:
        self.config, self.weights, self.speculation, self.device = config, weights, speculation, device
        self.aux, self.ids = text.aux_hidden_states.to(device), text.input_ids.to(device)
        self.counted, self.follows = text.counted, text.follows
        self.plain = self._best(weights)

    def measure(self, quant: DraftQuant) -> Measured:
        """This recipe, quantised, run and compared."""
        made = quantize(self.weights, quant)
        best = self.plain if quant == DraftQuant() else self._best(made)
        step = sum(w.nbytes for name, w in made.named() if name in _READ_BY_STEPS or name.startswith("layers."))
        if made.lm_head_rows is not None:
            topk = self.speculation.topk
            step += topk * rescored(topk) * made.lm_head_rows[0].nbytes
        return Measured(
            quant=quant,
            nbytes=self.speculation.num_steps * step + made.fc.nbytes,
            seconds=self._cycle_seconds(made),
            same_best=float((best == self.plain).float().mean()),
            accept=None if self.follows is None else agreed(best, self.weights.d2t, self.follows),
        )

    @torch.inference_mode()
    def _best(self, weights: DraftWeights) -> Tensor:
        """The draft id that the reference finds best at each counted row."""
        with torch.device(self.device):  # where the reference makes its tensors
            cache = reference.DraftCache.empty(self.config, weights.fc.dtype)
            rows = len(self.ids)
            visible = torch.ones(rows, rows, dtype=torch.bool).tril()
            hidden = reference.fuse(self.config, weights, self.aux)
            logits, hidden = reference.forward(
                self.config, weights, cache, hidden, self.ids, torch.arange(rows), visible
            )
            logits, hidden = logits[-self.counted :], hidden[-self.counted :]
            logits, ids = reference.rescore(self.config, weights, logits, hidden, self.speculation.topk)
            return ids.gather(1, logits.gather(1, ids).argmax(-1, keepdim=True))[:, 0]

    def _cycle_seconds(self, weights: DraftWeights) -> float:
        """One cycle at batch 1 behind the text: the least of several rounds, since what disturbs only adds."""
        speculation = self.speculation
        rows = min(len(self.ids), self.config.max_positions - speculation.num_steps - 1)  # else there is no room
        accepted = min(speculation.num_draft_tokens, rows)
        slots = DraftSlots(
            self.config, weights, speculation=speculation, max_batch=1, max_length=rows + speculation.num_steps + 2,
            max_rows=rows, device=self.device,
        )  # fmt: skip
        slots.run([self._rows(0, rows)])
        batch = batch_of([self._rows(rows - accepted, rows)], device=self.device, sampled=self._sampled)
        least, until, cycles = float("inf"), time.perf_counter() + _ROUND_SECONDS, _CYCLES
        for done in range(_ROUNDS):
            self._wait()
            begun = time.perf_counter()
            for _ in range(cycles):
                slots.engine.run(batch, current_stream(self.device))
            self._wait()
            least = min(least, (time.perf_counter() - begun) / cycles)
            if done and time.perf_counter() > until:
                break
            cycles = min(_MOST_CYCLES, max(_CYCLES, round(_LEAST_ROUND / least)))
        return least

    def accept_length(self) -> float | None:
        """Of a chain of the stored draft, bonus counted: the mean over drafts from the text's counted rows, as far as
        the target's text goes beyond them. None where there is no such text.
        """
        steps, first = self.speculation.num_steps, len(self.ids) - self.counted
        last = min(len(self.ids), self.config.max_positions) - steps
        if self.follows is None or steps == 0 or first >= last:
            return None
        slots = DraftSlots(
            self.config, self.weights, speculation=SpeculationConfig(num_steps=steps), max_batch=1,
            max_length=last + steps + 1, max_rows=max(1, first), device=self.device,
        )  # fmt: skip
        if first:
            prompt = self._rows(0, first)
            slots.run([dataclasses.replace(prompt, draft_from=False, temperature=0.0, uniforms=None)])
        lengths, until = [], time.perf_counter() + _DRAFT_SECONDS
        for row in range(first, last):
            slots.run([dataclasses.replace(self._rows(row, row + 1), temperature=0.0, uniforms=None)])
            results = slots.engine.results
            drafted = results.draft_tokens[1, : int(results.num_nodes[1])].cpu()
            said = self.follows[row - first :][: len(drafted)]
            lengths.append(1.0 + float((drafted == said).long().cumprod(0).sum()))
            if time.perf_counter() > until:
                break
        return sum(lengths) / len(lengths)

    @property
    def _sampled(self) -> bool:
        return self.speculation.sampling is Sampling.REJECTION

    def _rows(self, first: int, last: int) -> DraftRows:
        uniforms = torch.full((self.speculation.num_steps,), 0.5) if self._sampled else None
        return DraftRows(
            slot=1, length=first, aux_hidden_states=self.aux[first:last],
            next_tokens=self.ids[first:last].tolist(), temperature=1.0, uniforms=uniforms,
        )  # fmt: skip

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _fits(weights: DraftWeights, part: Part, precision: Precision) -> bool:
    """INT4 rows begin at a byte, so they have an even number of inputs."""
    shapes = [weight.shape for name, weight in weights.named() if part_of(name) is part]
    return precision is not Precision.INT4 or all(shape[1] % 2 == 0 for shape in shapes)


def _plain_parts(weights: DraftWeights) -> list[Part]:
    """The parts that no matrix of is packed yet, the one of the most bytes first."""
    sizes: dict[Part, int] = dict.fromkeys(Part, 0)
    packed: set[Part] = set()
    for name, weight in weights.named():
        part = part_of(name)
        if part is not None:
            sizes[part] += weight.nbytes
            if isinstance(weight, PackedWeight):
                packed.add(part)
    return sorted((part for part in Part if part not in packed), key=lambda part: -sizes[part])


@dataclasses.dataclass(frozen=True)
class _Known:
    """What was measured of the stored draft beside its recipe's figures."""

    num_steps: int
    length: float | None = None  # accept length on the text, by a chain
    apart: float = 0.0  # seconds that two runs were apart


def _score(stored: Measured, alone: list[Measured], text: CalibrationText, known: _Known) -> Score:
    """What the text shows of acceptance; what it cannot show is assumed."""
    verify, steps = text.verify_seconds or VERIFY_CYCLES * stored.seconds, known.num_steps
    near = max(NEAR, known.apart / (verify + stored.seconds))
    if not stored.accept:
        return Score(num_steps=steps, verify_seconds=verify, accept=ACCEPT, loss=LOSS, near=near)
    differ = sum(1 - each.same_best for each in alone)
    lost = sum(stored.accept - each.accept for each in alone if each.accept is not None)
    # Over all recipes together, since a single one's loss on so few rows is mostly chance. Never a gain.
    loss = min(1.0, max(LOSS / 2, lost / differ / stored.accept)) if differ else LOSS
    accept = stored.accept if known.length is None else _accept_of(known.length, steps)
    return Score(num_steps=steps, verify_seconds=verify, accept=accept, loss=loss, near=near)


def _accept_of(length: float, num_steps: int) -> float:
    """The a of 1 + a + … + a^K = length, between 0 and 1."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(num_steps + 1)) < length else (low, middle)
    return high


def _best_sum(stored: Measured, alone: dict[tuple[Part, Precision], Measured], score: Score) -> DraftQuant:
    """The recipe that scores best where its parts' savings and lost agreements add up."""

    def candidates() -> Iterator[Measured]:
        options: list[list[tuple[Part, Precision | None]]] = [
            [(part, None), *((part, precision) for precision in _LOW if (part, precision) in alone)] for part in Part
        ]
        for recipe in itertools.product(*options):
            taken = [alone[part, precision] for part, precision in recipe if precision is not None]
            yield Measured(
                quant=DraftQuant(**{part.value: precision for part, precision in recipe}),
                nbytes=0,
                seconds=max(0.0, stored.seconds + sum(each.seconds - stored.seconds for each in taken)),
                same_best=max(0.0, 1 - sum(1 - each.same_best for each in taken)),
                accept=None,
            )

    return _first_of_equals(list(candidates()), score).quant


def _first_of_equals(found: list[Measured], score: Score) -> Measured:
    """Of all that score as well as the best, the one that agrees most, then the earliest."""
    enough = (1 - score.near) * max(score.of(each) for each in found)
    return max((each for each in found if score.of(each) >= enough), key=lambda each: each.same_best)


def _lines(
    found: list[Measured], chosen: Measured, score: Score, text: CalibrationText, skipped: list[str]
) -> Iterator[str]:
    stored = found[0]
    verify = f"{score.verify_seconds * 1e3:.3f} ms"
    said = f"measured {verify}" if text.verify_seconds else f"taken for {VERIFY_CYCLES:g} cycles as stored, {verify}"
    whose = "measured" if stored.accept else "assumed"
    hits = f"{stored.accept or score.accept:.1%}"
    yield (
        f"draft_quant auto: {text.counted} rows of {text.origin}; the draft's best token is the target's in {hits} and "
        f"its accept length {score.accept_length(1.0):.3f}, a best token that differs costs {score.loss:.2f} of one "
        f"({whose}); a verification is {said}"
    )
    names = ["as stored" if each.quant == DraftQuant() else str(each.quant) for each in found]
    wide = max(map(len, ["recipe", *names]))
    yield f"  {'recipe':<{wide}}  MB/cycle  ms/cycle  same best  accept length  tokens/s"
    for name, each in zip(names, found, strict=True):
        yield (
            f"{'*' if each is chosen else ' '} {name:<{wide}}  {each.nbytes / 1e6:8.2f}  {each.seconds * 1e3:8.3f}  "
            f"{each.same_best:9.1%}  {score.accept_length(each.same_best):13.3f}  {score.of(each):8.1f}"
        )
    if skipped:
        yield f"  not measured, as {SECONDS:g} s were over: {', '.join(skipped)}"
    yield f"draft_quant: {names[found.index(chosen)]}: {_reason(found, chosen, score)}"


def _reason(found: list[Measured], chosen: Measured, score: Score) -> str:
    stored = found[0]
    if chosen is stored:
        others = sorted(found[1:], key=score.of)
        if not others:
            return "no part is left to be quantised"
        best = others[-1]
        why = "what two runs as stored are apart" if score.near > NEAR else "the least that counts"
        gain = score.of(best) / score.of(stored) - 1
        nothing = f"nothing gains more than {score.near:.1%}, {why}"
        return f"{nothing}; {best.quant} comes next with {gain:+.1%} tokens per second"
    gain = score.of(chosen) / score.of(stored) - 1
    return (
        f"{gain:+.1%} tokens per second: a cycle takes {chosen.seconds * 1e3:.3f} ms instead of "
        f"{stored.seconds * 1e3:.3f}, for an accept length of {score.accept_length(chosen.same_best):.3f} instead of "
        f"{score.accept_length(stored.same_best):.3f} (estimated, as of a chain)"
    )
