"""What the worker takes from the host and what the host takes from the worker, read from the host's sources.

0.5.17 is the version that the worker runs on: everything must fit. Of 0.5.23 the tests hold what is known to differ, so
that opening it is a list to work through, and a further change of the host is seen.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from conftest import package_of
from host_source import attributes_of, class_def, defined_names, members, methods, module_file, parameters, parse

import eaglex
from eaglex.hosts.sglang import arguments, compat

OURS = Path(eaglex.__file__).parent / "hosts" / "sglang"
SPECULATIVE = "sglang.srt.speculative"
WORKER = parse(OURS / "worker.py")
DRAFT = parse(OURS / "draft.py")

# Attributes that the host touches only for an algorithm that answers so; EAGLEX answers "no".
OTHER_ALGORITHMS = {
    "block_accept_estimate_log_suffix": "is_dspark",
    "clear_info_records": "is_dspark",
    "dump_info_records": "is_dspark",
    "get_confidence_budget_prepare": "needs_confidence_relay",
    "set_dspark_forced_budget_frac": "is_dspark",
}
REFUSED_WITH_IT = {"model_runner"}  # weight export of the draft to a URL: EAGLE3's worker has no such attribute either
DIFFERS = {  # of the newest version, apart from what the oldest has
    "EAGLEWorkerV2.__init__": ["self", "server_args", "gpu_id", "nccl_port", "target_worker"],
    "EAGLEWorkerV2.forward_batch_generation": [
        "self", "batch", "on_publish=", "grammar_barrier=", "pp_proxy_tensors=",
    ],
    "EAGLEWorkerV2.war_fastpath_runner": None,  # now last_shared_read_runner
    "EAGLEWorkerV2.update_weights_from_tensor": None,  # weight updates ask weight_update_runners
    "EagleDraftWorker.draft": ["self", "batch", "*", "with_topology="],
}  # fmt: skip



def ours(name: str) -> ast.ClassDef:
    found = [
        node for tree in (WORKER, DRAFT) for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return found[0]


def host_members(package: Path, *names: tuple[str, str]) -> set[str]:
    return set().union(*(members(class_def(package, f"{SPECULATIVE}.{module}", name)) for module, name in names))


def worker_members(package: Path) -> set[str]:
    stock = host_members(package, ("eagle_worker_v2", "EAGLEWorkerV2"), ("base_spec_worker", "BaseSpecWorker"))
    return stock | members(ours("EaglexWorker"))


def draft_members(package: Path) -> set[str]:
    stock = host_members(
        package, ("eagle_worker_v2", "EagleDraftWorker"), ("base_spec_worker", "EagleDraftWorkerBase")
    )
    return stock | members(ours("EaglexDraftWorker"))


@pytest.mark.parametrize("name", sorted(compat.SYMBOLS))
def test_symbols_exist(host: Path, name: str) -> None:
    assert name in defined_names(parse(module_file(host, compat.SYMBOLS[name])))


def signature_differences(package: Path) -> dict[str, list[str] | None]:
    """Methods that our classes replace, where the host's takes other parameters (None: it has no such method)."""
    base = methods(class_def(package, f"{SPECULATIVE}.base_spec_worker", "BaseSpecWorker"))
    different: dict[str, list[str] | None] = {}
    for our_name, host_name in (("EaglexWorker", "EAGLEWorkerV2"), ("EaglexDraftWorker", "EagleDraftWorker")):
        stock = {**base, **methods(class_def(package, f"{SPECULATIVE}.eagle_worker_v2", host_name))}
        known = set(methods(ours(our_name))) & set(
            methods(class_def(package_of(compat.RUN_VERSIONS[0]), f"{SPECULATIVE}.eagle_worker_v2", host_name))
        )
        for name in known:
            theirs = parameters(stock[name]) if name in stock else None
            if theirs != parameters(methods(ours(our_name))[name]):
                different[f"{host_name}.{name}"] = theirs
    return different


def test_replaced_methods_have_the_hosts_signatures(running_host: Path) -> None:
    assert signature_differences(running_host) == {}


def test_the_newest_version_differs_where_it_is_known_to() -> None:
    assert signature_differences(package_of(compat.READ_VERSIONS[-1])) == DIFFERS


def touched_by_host(package: Path) -> set[str]:
    """Attributes that the scheduler and its components take from the worker."""
    managers = package / "srt" / "managers"
    files = [managers / "scheduler.py", *sorted((managers / "scheduler_components").glob("*.py"))]
    files.append(package / "srt" / "mem_cache" / "kv_cache_builder.py")
    touched: set[str] = set()
    for file in files:
        tree = parse(file)
        for base in ("self.draft_worker", "self.model_worker", "draft_worker", "scheduler.draft_worker"):
            touched |= attributes_of(tree, base)
        for node in ast.walk(tree):  # getattr(self.draft_worker, "name", ...)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
                name = node.args[1]
                if ast.unparse(node.args[0]).endswith("draft_worker") and isinstance(name, ast.Constant):
                    touched |= set() if len(node.args) > 2 else {str(name.value)}
    return touched


def test_the_worker_has_what_the_scheduler_touches(running_host: Path) -> None:
    touched = touched_by_host(running_host)
    assert {"forward_batch_generation", "war_fastpath_runner", "clear_cache_pool", "alloc_memory_pool"} <= touched
    assert touched - worker_members(running_host) - set(OTHER_ALGORITHMS) - REFUSED_WITH_IT == set()


def test_what_the_newest_version_touches_beyond_the_oldest() -> None:
    newest = package_of(compat.READ_VERSIONS[-1])
    assert touched_by_host(newest) - worker_members(newest) - set(OTHER_ALGORITHMS) - REFUSED_WITH_IT == set()


def test_inherited_members_that_our_classes_use_exist(running_host: Path) -> None:
    assert attributes_of(ours("EaglexDraftWorker"), "self") <= draft_members(running_host)
    assert attributes_of(ours("EaglexWorker"), "self") <= worker_members(running_host)
    assert attributes_of(ours("EaglexWorker"), "self._draft_worker") <= draft_members(running_host)


FIELDS = {  # variables of ours -> class of the host
    ("draft", "batch"): ("sglang.srt.managers.schedule_batch", "ScheduleBatch"),
    ("draft", "step"): ("sglang.srt.managers.schedule_batch", "ScheduleBatch"),
    ("worker", "batch"): ("sglang.srt.managers.schedule_batch", "ScheduleBatch"),
    ("worker", "result"): ("sglang.srt.managers.utils", "GenerationBatchResult"),
    ("worker", "result.logits_output"): ("sglang.srt.layers.logits_processor", "LogitsProcessorOutput"),
    ("draft", "verify_input"): (f"{SPECULATIVE}.eagle_info", "EagleVerifyInput"),
    ("draft", "memory_pool_config"): ("sglang.srt.model_executor.pool_configurator", "MemoryPoolConfig"),
    ("draft", "backend"): ("sglang.srt.layers.attention.triton_backend", "TritonMultiStepDraftBackend"),
}


@pytest.mark.parametrize(("place", "owner"), FIELDS.items(), ids=lambda item: ".".join(item))
def test_fields_that_our_classes_use_exist(host: Path, place: tuple[str, str], owner: tuple[str, str]) -> None:
    module, variable = place
    used = attributes_of(DRAFT if module == "draft" else WORKER, variable)
    assert used, f"{module}.py no longer uses {variable}"
    assert used <= members(class_def(host, *owner))


def test_draft_input_fields(host: Path) -> None:
    owner = members(class_def(host, f"{SPECULATIVE}.eagle_info", "EagleDraftInput"))
    assert {"bonus_tokens", "topk_p", "topk_index", "num_tokens_per_req", "num_tokens_for_logprob_per_req"} <= owner


def test_refused_options_exist(host: Path) -> None:
    known = members(class_def(host, "sglang.srt.server_args", "ServerArgs"))
    for file in (host / "srt" / "arg_groups" / "fields").glob("*.py"):  # where the newest version keeps them
        known |= set().union(*(members(node) for node in parse(file).body if isinstance(node, ast.ClassDef)))
    assert {refused.option for refused in arguments.REFUSED} <= known
    assert attributes_of(parse(OURS / "arguments.py"), "server_args") <= known


def test_drafting_early_is_the_hosts_own_sequence(running_host: Path) -> None:
    """What `_step_batch` sets follows the host's `prepare_for_draft`: the same fields of the batch and of its input."""
    tree = parse(module_file(running_host, f"{SPECULATIVE}.eagle_worker_common"))
    prepare = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "prepare_for_draft")
    sets = {
        ast.unparse(target)
        for node in ast.walk(prepare)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }
    assert sets == {
        "batch.out_cache_loc",
        "draft_input.num_tokens_per_req",
        "draft_input.num_tokens_for_logprob_per_req",
        "draft_input.positions",
    }


def test_what_a_verifier_input_is_set_back_to_is_read(host: Path) -> None:
    """Why `draft` sets `topk` and `spec_steps` back: the sampler takes widths from them, by these two properties."""
    owner = methods(class_def(host, f"{SPECULATIVE}.eagle_info", "EagleVerifyInput"))
    assert ast.unparse(owner["max_tree_depth"].body[-1]) == "return self.spec_steps + 1"
    assert ast.unparse(owner["tree_topk"].body[-1]) == "return self.topk"
    tree = parse(module_file(host, f"{SPECULATIVE}.eagle_utils"))
    sample = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "eagle_sample")
    assert {"max_tree_depth", "tree_topk"} <= attributes_of(sample, "verify_input")


def test_the_host_passes_tokens_on_after_it_launches_the_next_forward(host: Path) -> None:
    """Why the draft is enqueued at the next forward's top, not sooner: what comes before it holds no token back."""
    loop = methods(class_def(host, "sglang.srt.managers.scheduler", "Scheduler"))["event_loop_overlap"]
    lines: dict[str, list[int]] = {}
    for node in ast.walk(loop):
        if isinstance(node, ast.Call):
            lines.setdefault(ast.unparse(node.func), []).append(node.lineno)
    assert max(lines["pop_and_process"]) > max(lines["self.run_batch"])


KEPT = ("reqs", "extend_lens", "prefix_lens", "seq_lens", "seq_lens_cpu", "req_pool_indices", "out_cache_loc")
IN_PLACE = ("append", "extend", "pop", "remove", "insert", "clear", "sort", "add_", "copy_", "fill_")


def test_what_a_late_draft_reads_of_a_batch_is_replaced_not_changed(running_host: Path) -> None:
    """The draft keeps a shallow copy of the batch, and runs on it after the host has scheduled the next one."""
    owner = methods(class_def(running_host, "sglang.srt.managers.schedule_batch", "ScheduleBatch"))
    changed = set()
    for name in ("filter_batch", "merge_batch", "prepare_for_decode", "prepare_for_extend", "retract_decode"):
        for node in ast.walk(owner[name]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE:
                changed.add((name, ast.unparse(node.func.value)))
            if isinstance(node, ast.AugAssign):
                changed.add((name, ast.unparse(node.target)))
    assert changed.isdisjoint({(name, f"self.{kept}") for name in owner for kept in KEPT})


def test_a_batch_has_its_slots_on_the_cpu_too(running_host: Path) -> None:
    """What a dedicated drafter's requests are told apart by: `DedicatedDraft.begin`."""
    owner = methods(class_def(running_host, "sglang.srt.managers.schedule_batch", "ScheduleBatch"))
    for name in ("filter_batch", "merge_batch", "prepare_for_extend"):
        text = ast.unparse(owner[name])
        for place in ("req_pool_indices", "req_pool_indices_cpu"):
            assert f"self.{place} = " in text, name


def test_rows_of_the_table_are_rewritten_through_the_pool(running_host: Path) -> None:
    """Why `Rewritten` sees what the radix cache does to a running request: a slot, and a slice that has an end."""
    cache = class_def(running_host, "sglang.srt.mem_cache.radix_cache", "RadixCache")
    writes = [
        node.args[0]
        for node in ast.walk(cache)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.req_to_token_pool.write"
    ]
    assert writes
    for indices in writes:
        assert isinstance(indices, ast.Tuple)
        assert "req_pool_idx" in ast.unparse(indices.elts[0])
        assert isinstance(indices.elts[1], ast.Call)
        assert ast.unparse(indices.elts[1].func) == "slice"
        assert len(indices.elts[1].args) == 2
    stores = [node for node in ast.walk(cache) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    assert not [node for node in stores if "req_to_token" in ast.unparse(node.value)]


def test_a_turn_ends_where_the_draft_is_enqueued(running_host: Path) -> None:
    """`hooks.at_the_end_of_a_turn`: called in every turn of the overlapped loop, after the last batch's results."""
    loop = methods(class_def(running_host, compat.SYMBOLS["Scheduler"], "Scheduler"))["event_loop_overlap"]
    turn = next(node for node in loop.body if isinstance(node, ast.While))
    calls = [[ast.unparse(n.func) for n in ast.walk(part) if isinstance(n, ast.Call)] for part in turn.body]
    (hook,) = (i for i, made in enumerate(calls) if "self.launch_batch_sample_if_needed" in made)
    assert isinstance(turn.body[hook], ast.If)
    assert ast.unparse(turn.body[hook].test) == "self.is_generation"
    assert hook > max(i for i, made in enumerate(calls) if {"pop_and_process", "self.run_batch"} & set(made))


def test_memory_is_released_before_the_flush(running_host: Path) -> None:
    """Why `hooks.around` the release exists: the host pauses the KV pool's memory and flushes only then."""
    owner = class_def(running_host, compat.SYMBOLS["SchedulerWeightUpdaterManager"], "SchedulerWeightUpdaterManager")
    release = methods(owner)["release_memory_occupation"]
    lines: dict[str, list[int]] = {}
    for node in ast.walk(release):
        if isinstance(node, ast.Call):
            lines.setdefault(ast.unparse(node.func), []).append(node.lineno)
    assert min(lines["self.memory_saver_adapter.pause"]) < min(lines["self.flush_cache"])


def test_what_the_host_itself_refuses_beside_any_name_but_its_own(running_host: Path) -> None:
    """LoRA, rejection sampling and mixed chunks, which docs/sglang.md leaves to the host."""
    arguments = methods(class_def(running_host, "sglang.srt.server_args", "ServerArgs"))
    lora = ast.unparse(arguments["check_lora_server_args"])
    assert "self.speculative_algorithm not in ['NGRAM', None]" in lora
    hook = parse(module_file(running_host, "sglang.srt.arg_groups.speculative_hook"))
    family = next(n for n in hook.body if isinstance(n, ast.FunctionDef) and n.name == "_handle_eagle_family")
    tests = {ast.unparse(node.test): ast.unparse(node) for node in ast.walk(family) if isinstance(node, ast.If)}
    sampling = tests["server_args.speculative_use_rejection_sampling"]
    assert "server_args.speculative_algorithm not in ('EAGLE', 'EAGLE3')" in sampling
    assert "raise NotImplementedError" in sampling
    assert "server_args.enable_mixed_chunk = False" in tests["server_args.enable_mixed_chunk"]
