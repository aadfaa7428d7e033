"""Random schedules through two engines at once: the plain chain and the CPU engine, the fast chain and the plain one.

Short here; EAGLEX_SOAK_MINUTES sets how long each of the schedules runs, EAGLEX_SOAK_SEED which schedule it is.
support/cuda_soak.py is the same as a program, over drafts drawn by chance.
"""

from __future__ import annotations

import os
import time

import pytest
from support.cuda_soak import LAYOUT, against_the_cpu, against_the_plain_chain, check
from support.models import make_config
from support.rig import Layout
from support.soak import Soak
from support.streamed import make_streamed_config

from eaglex.config import SpeculationConfig

pytestmark = pytest.mark.gpu

MINUTES = float(os.environ.get("EAGLEX_SOAK_MINUTES", "0.05"))
SEED = int(os.environ.get("EAGLEX_SOAK_SEED", "0"))
SCHEDULES = {
    "chain": {"num_steps": 4},
    "chain that stops": {"num_steps": 6, "stop_below": 0.02},
    "tree": {"num_steps": 3, "topk": 3, "num_draft_tokens": 10},
    "tree that stops": {"num_steps": 4, "topk": 2, "num_draft_tokens": 9, "stop_below": 0.05},
}
# The fast chain's drafts have a larger vocabulary, so a token's probability is smaller.
STREAMED = SCHEDULES | {
    "chain that stops": SCHEDULES["chain that stops"] | {"stop_below": 1e-4},
    "tree that stops": SCHEDULES["tree that stops"] | {"stop_below": 0.01},
}


def run(soak: Soak, *, seconds: float, least: int, exact: bool) -> None:
    """Cycles for so long, and at least so many."""
    end = time.monotonic() + seconds
    while time.monotonic() < end or soak.tally.cycles < least:
        soak.cycle()
    print(f"seed {SEED}: {soak.tally}")
    check(soak, exact=exact)
    assert (soak.tally.stops > 0) == (soak.oracle.speculation.stop_below > 0)


@pytest.mark.timeout(120 + 90 * MINUTES)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layers", [1, 2])
def test_the_cpu_engine_drafts_the_same(name, layers) -> None:
    config = make_config(num_layers=layers, max_positions=160)
    soak = against_the_cpu(config, SpeculationConfig(**SCHEDULES[name]), Layout(**LAYOUT, page_size=layers * 4), SEED)
    run(soak, seconds=60 * MINUTES, least=30, exact=True)


@pytest.mark.timeout(120 + 90 * MINUTES)
@pytest.mark.parametrize(("name", "precision"), [*((name, "bf16") for name in STREAMED), ("chain", "fp8"),
                                                 ("tree that stops", "int4")])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_fast_chain_drafts_as_the_plain_one(name, precision, layers) -> None:
    """In bf16 some drafts take another way at a near tie (up to 20 % were seen); each that does is judged."""
    config = make_streamed_config(num_layers=layers, max_positions=160)
    soak = against_the_plain_chain(config, SpeculationConfig(**STREAMED[name]),
                                   Layout(**LAYOUT, page_size=layers * 4), SEED, precision)
    run(soak, seconds=60 * MINUTES, least=30, exact=False)
    print(f"judged {len(soak.judge.regrets)}, worst score {soak.judge.worst}, worst choice {max(soak.judge.regrets)}")
