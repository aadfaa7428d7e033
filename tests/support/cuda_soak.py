"""Soaks of the CUDA engine: random schedules through two engines at once, for as long as one likes.

    PYTHONPATH=.:tests python -m support.cuda_soak bf16 --seconds 90 --seed 7

`plain` holds the plain chain in float32 to the CPU engine's ids; `bf16`, `fp8` and `int4` hold the fast chain to the
plain one, and what differs, and a tenth of the rest, to float64 (support/judge.py). Each run draws some drafts and
speculations from its seed and gives them cycles in turn. Ends with an error where a draft is wrong: with --spoil, which
gives the engine under test a final norm that is 3 % too large, it must.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import time
from unittest import mock

import torch

from eaglex.config import AuxNorm, DraftConfig, NextHidden, Residual, SpeculationConfig
from eaglex.packed import DraftQuant
from eaglex.quantize import quantize
from eaglex.weights import DraftWeights
from support.cuda_rig import CudaRig
from support.models import make_config, random_weights
from support.rig import Layout, Rig
from support.soak import JudgedSoak, Soak, Tally
from support.streamed import PlainChainRig, StreamedRig, make_streamed_config

KINDS = ("plain", "bf16", "fp8", "int4")
LAYOUT = {"num_slots": 14, "max_batch": 11, "max_rows": 160}


def against_the_cpu(config: DraftConfig, speculation: SpeculationConfig, layout: Layout, seed: int,
                    *, spoil: bool = False) -> Soak:
    """The plain chain and the CPU engine, in float32: equal ids."""
    oracle = Rig(config, speculation, layout=layout)
    return Soak(oracle, CudaRig(config, speculation, share=oracle, weights=tested(oracle.weights, spoil)), seed)


def tested(weights: DraftWeights, spoil: bool) -> DraftWeights:
    """Those of the engine under test: the oracle's, or ones that must be found out."""
    return dataclasses.replace(weights, norm=weights.norm * 1.03) if spoil else weights


def against_the_plain_chain(config: DraftConfig, speculation: SpeculationConfig, layout: Layout, seed: int,
                            precision: str = "bf16", *, spoil: bool = False) -> JudgedSoak:
    """The fast chain and the plain one, in bf16 with matrices of that precision: what differs is judged."""
    weights = random_weights(config, dtype=torch.bfloat16)
    if precision != "bf16":
        weights = quantize(weights, DraftQuant.parse(precision))
    with mock.patch.dict(os.environ, EAGLEX_CHAIN="plain"):
        oracle = PlainChainRig(config, speculation, layout=layout, weights=weights)
    with mock.patch.dict(os.environ, EAGLEX_CHAIN="fast"):
        subject = StreamedRig(config, speculation, share=oracle, weights=tested(weights, spoil))
        return JudgedSoak(oracle, subject, seed)


def check(soak: Soak, *, exact: bool) -> None:
    """That it has seen what a schedule is made of, and few decisions that rounding could excuse."""
    tally, speculation = soak.tally, soak.oracle.speculation
    assert min(tally.drafts, tally.joins, tally.leaves, tally.pads) > 0, tally
    assert tally.unclear <= max(3, tally.drafts // (200 if exact else 3)), tally
    assert speculation.stop_below > 0 or not tally.stops, tally


def drawn(kind: str, roll: random.Random, spoil: bool) -> Soak:
    """A draft, a speculation and a layout by chance."""
    steps, topk = roll.randint(1, 6), roll.choice((1, 1, 2, 3, 4))
    most = SpeculationConfig(num_steps=steps, topk=topk, num_draft_tokens=steps + 1).num_candidates + 1
    speculation = SpeculationConfig(num_steps=steps, topk=topk, num_draft_tokens=roll.randint(steps + 1, min(most, 14)),
                                    stop_below=roll.choice((0.0, 0.0, 1e-3, 0.05)))
    # Of 40 requests with up to 14 rows each an extend runs in parts, or, at its largest, by the plain chain.
    lanes = roll.choice((5, 11, 40))
    layout = Layout(num_slots=lanes + 3, max_batch=lanes, max_rows=14 * lanes, page_size=roll.choice((1, 4, 16)),
                    id_dtype=roll.choice((torch.int32, torch.int64)))
    changes = {"num_layers": roll.choice((1, 1, 2)), "max_positions": 160, "aux_norm": roll.choice(list(AuxNorm)),
               "residual": roll.choice(list(Residual)), "next_hidden": roll.choice(list(NextHidden)),
               "num_kv_heads": roll.choice((1, 2, 4)), "num_heads": 4}
    seed = roll.randrange(2**31)
    if kind == "plain":
        return against_the_cpu(make_config(**changes), speculation, layout, seed, spoil=spoil)
    config = make_streamed_config(**changes, head_dim=roll.choice((64, 96, 128, 256)),
                                  hidden_size=roll.choice((256, 320)), intermediate_size=roll.choice((512, 448)))
    return against_the_plain_chain(config, speculation, layout, seed, kind, spoil=spoil)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--drafts", type=int, default=4, help="how many of them")
    parser.add_argument("--spoil", action="store_true", help="with wrong weights in the engine under test")
    options = parser.parse_args()
    print(f"soak of {options.kind}, seed {options.seed}", flush=True)
    end, roll = time.monotonic() + options.seconds, random.Random(options.seed)
    soaks = [drawn(options.kind, roll, options.spoil) for _ in range(options.drafts)]
    while time.monotonic() < end:
        for soak in soaks:
            for _ in range(5):
                soak.cycle()
            if time.monotonic() >= end:
                break
    total = Tally()
    for soak in soaks:
        for field in dataclasses.fields(Tally):
            setattr(total, field.name, getattr(total, field.name) + getattr(soak.tally, field.name))
        if soak.tally.cycles >= 60:
            check(soak, exact=options.kind == "plain")
    judged = [soak for soak in soaks if isinstance(soak, JudgedSoak) and soak.judge.regrets]
    if judged:
        print(f"judged {sum(len(soak.judge.regrets) for soak in judged)}, worst score "
              f"{max(soak.judge.worst for soak in judged):.3f}, worst choice "
              f"{max(max(soak.judge.regrets) for soak in judged):.3f}")
    print(f"soak of {options.kind}, seed {options.seed}: {total}: right", flush=True)


if __name__ == "__main__":
    main()
