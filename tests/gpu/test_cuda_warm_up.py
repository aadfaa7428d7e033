"""warm_up leaves nothing for the first prompt: in a process of its own, where no test has loaded a kernel yet."""

from __future__ import annotations

import os

import pytest
import torch
from support.own_process import own_process
from support.rig import Ask, Layout
from support.streamed import StreamedRig, make_streamed_config

from eaglex.config import SpeculationConfig

pytestmark = pytest.mark.gpu


@own_process
def test_the_first_prompt_finds_everything_loaded() -> None:
    """Behind a device that is busy for about a second, a prompt of 700 rows and cycles of all kinds return at once."""
    rig = StreamedRig(make_streamed_config(max_positions=2048), SpeculationConfig(num_steps=3),
                      layout=Layout(max_rows=1000))
    asks = [[Ask(2, 70)], [Ask(0, 700)], [Ask(1, 300)], [Ask(r, 100) for r in range(2)],
            [Ask(r, 4) for r in range(5)], [Ask(3, 9)]]
    for request in range(5):
        rig.join(request, 1 + request)
    batches = [rig.batch(cycle) for cycle in asks]
    for batch in batches:  # rows that the fast chain cannot read
        batches = [*batches, type(batch)(**{**vars(batch), "aux_hidden_states": batch.aux_hidden_states.float()})]
    rig.engine.warm_up()
    torch.cuda._sleep(1000)
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    for batch in batches:
        rig.engine.enqueue(batch)
    assert not busy.query(), "a call waited for the device"
    torch.cuda.synchronize()
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other workers use the same device's memory
        assert torch.cuda.mem_get_info()[0] == free
    assert rig.engine.counters()["drafted"] == 2 * (1 + 1 + 1 + 2 + 5 + 1)
