"""The worker with eaglex's engine on SGLang's own classes: base class, verifier input, KV sizing."""

from __future__ import annotations

import ast
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import engine_child
from host_source import class_def, methods, parameters


def asked(function: Any, package: Path) -> Any:
    """In a process of its own, as packages that are not installed are replaced there."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, str(package)).result(timeout=90)


def test_the_algorithm_builds_the_worker_on_the_hosts_base_class(running_host: Path) -> None:
    assert asked(engine_child.worker_class, running_host) == {
        "name": "EaglexEngineWorker", "derived": True, "abstract": [], "has_draft_kv": False,
    }  # fmt: skip


def test_the_verifiers_input_is_the_hosts_own(running_host: Path) -> None:
    made = asked(engine_child.verify_input, running_host)
    shapes = (True, 4, 2, 6, (12,), (2, 6))
    assert made["FULL_MASK"] == (*shapes, (4 * 6 * 106,), "full", True)
    assert made["QLEN_ONLY"] == (*shapes, (2, 6, 6), "qlen_only", True)


def test_the_hosts_sizing_of_a_token_asks_what_is_replaced(running_host: Path) -> None:
    """Why `charge_kv` counts: the configurator asks this method, and adds its own estimate only for draft layers."""
    owner = class_def(running_host, "sglang.srt.model_executor.pool_configurator", "DefaultPoolConfigurator")
    made = methods(owner)
    text = ast.unparse(made["__init__"])
    assert "self._cell_size = self._compute_cell_size(kvc, num_layers)" in text
    assert "eagle_draft_num_layers = kvc.spec_aux_config.eagle_draft_num_layers" in text
    assert "eagle_draft_num_layers is not None" in text
    assert parameters(made["_compute_cell_size"]) == ["self", "kvc", "num_layers"]
    configurator = class_def(running_host, "sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator")
    callers = [
        name for name, node in methods(configurator).items() if "create_memory_pool_configurator" in ast.unparse(node)
    ]
    assert callers
    assert "__post_init__" not in callers, "it is made with the pools, after the draft is loaded"
    scheduler = methods(class_def(running_host, "sglang.srt.managers.scheduler", "Scheduler"))["init_model_worker"]
    calls = [ast.unparse(node.func) for node in ast.walk(scheduler) if isinstance(node, ast.Call)]
    assert calls.index("self.maybe_init_draft_worker") < calls.index("self.init_memory_pools")


def test_the_results_event_is_recorded_before_the_host_waits_for_it(running_host: Path) -> None:
    """Why `Fence` needs no event of its own: copies behind verification, their event, the wait, and then the draft."""
    scheduler = methods(class_def(running_host, "sglang.srt.managers.scheduler", "Scheduler"))
    run, loop = (ast.unparse(scheduler[name]) for name in ("run_batch", "event_loop_overlap"))
    steps = ("batch_result.copy_done = ", "if batch_result.delay_sample_func is None", "self.copy_stream.wait_stream(")
    places = [run.index(step) for step in (*steps, "batch_result.copy_to_cpu(")]
    assert places[:3] == sorted(places[:3])
    assert "batch_result.copy_to_cpu(" in run[places[2] :]
    order = ("self.run_batch(batch)", "self._apply_war_barrier()", "self.launch_batch_sample_if_needed(")
    assert [loop.index(step) for step in order] == sorted(loop.index(step) for step in order)
    result = methods(class_def(running_host, "sglang.srt.managers.utils", "GenerationBatchResult"))
    assert ast.unparse(result["copy_to_cpu"]).endswith("self.copy_done.record()")
    assert "runner.war_fastpath_read_done_event = None" in ast.unparse(scheduler["_apply_war_barrier"])
