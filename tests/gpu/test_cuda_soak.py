"""Random schedules through the CUDA engine and the CPU engine at once.

Short by default. EAGLEX_SOAK_MINUTES sets how long each of the schedules runs, EAGLEX_SOAK_SEED which schedule it is:

    EAGLEX_SOAK_MINUTES=5 EAGLEX_SOAK_SEED=$RANDOM python -m pytest tests/gpu/test_cuda_soak.py -s
"""

from __future__ import annotations

import os
import time

import pytest
from support.cuda_rig import CudaRig
from support.models import make_config
from support.rig import Layout, Rig
from support.soak import Soak, Tally

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
LAYOUT = {"num_slots": 14, "max_batch": 11, "max_rows": 160}


def soak(oracle: Rig, subject: Rig, *, seconds: float, least: int) -> Tally:
    """Cycles for so long, and at least so many; the tally of what happened."""
    run = Soak(oracle, subject, SEED)
    end = time.monotonic() + seconds
    while time.monotonic() < end or run.tally.cycles < least:
        run.cycle()
    tally = run.tally
    print(f"seed {SEED}: {tally}")
    assert min(tally.drafts, tally.joins, tally.leaves, tally.pads) > 0
    assert tally.unclear <= max(3, tally.drafts // 200)
    return tally


@pytest.mark.timeout(120 + 90 * MINUTES)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layers", [1, 2])
def test_the_cpu_engine_drafts_the_same(name, layers) -> None:
    config = make_config(num_layers=layers, max_positions=160)
    speculation = SpeculationConfig(**SCHEDULES[name])
    oracle = Rig(config, speculation, layout=Layout(**LAYOUT, page_size=layers * 4))
    tally = soak(oracle, CudaRig(config, speculation, share=oracle), seconds=60 * MINUTES, least=30)
    assert (tally.stops > 0) == (speculation.stop_below > 0)
