"""eaglex's worker over the stand-ins of fake_host.py."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_host
import pytest
import torch
from fake_host import LOG

from eaglex.hosts.sglang import compat

SLOTS, POOL, PAGE, CONTEXT = 6, 256, 64, 50
HOOKED = (
    (fake_host.Scheduler, "launch_batch_sample_if_needed"),
    (fake_host.SchedulerWeightUpdaterManager, "release_memory_occupation"),
)
MODULES = ("eaglex.hosts.sglang.draft", "eaglex.hosts.sglang.worker")


@contextlib.contextmanager
def made_worker(slots: int = SLOTS, page_size: int = PAGE) -> Iterator[Any]:
    """A worker as the host leaves it after its start, with an empty log. The stand-ins are taken away afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, method in HOOKED:  # the worker puts its own in their place
            patch.setattr(owner, method, getattr(owner, method))
        patch.setattr(compat, "symbol", fake_host.SYMBOLS.__getitem__)
        for name, stand_in in {
            "Stream": fake_host.Stream,
            "Event": fake_host.Event,
            "stream": fake_host.OnStream,
            "current_stream": lambda: fake_host.Stream.current,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        for name in MODULES:
            sys.modules.pop(name, None)
        made = importlib.import_module(MODULES[1]).EaglexWorker(None, 0, None, 0, fake_host.TargetWorker())
        table = torch.arange((slots + 1) * CONTEXT, dtype=torch.int32).view(slots + 1, CONTEXT)
        made._draft_worker.alloc_memory_pool(
            memory_pool_config=fake_host.PoolConfig(POOL),
            req_to_token_pool=SimpleNamespace(req_to_token=table, size=slots),
            token_to_kv_pool_allocator=SimpleNamespace(size=POOL, page_size=page_size),
        )
        made._draft_worker.init_attention_backend()
        LOG.clear()
        try:
            yield made
        finally:
            for name in MODULES:
                sys.modules.pop(name, None)
