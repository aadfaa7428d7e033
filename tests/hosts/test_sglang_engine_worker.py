"""The worker with eaglex's engine, step by step: order, lifetimes, what the host relays, updates, refusals."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_host
import pytest
import torch
from fake_engine_host import Host, made_host
from fake_engine_parts import CONTEXT, Setting
from fake_host import LOG
from host_source import attributes_of, class_def, members, methods, module_file, parameters, parse
from test_sglang_contract import OTHER_ALGORITHMS, REFUSED_WITH_IT, touched_by_host

import eaglex
from eaglex import checkpoint
from eaglex.errors import ConfigError
from eaglex.hosts.sglang.hooks import UPDATES

OURS = Path(eaglex.__file__).parent / "hosts" / "sglang"
SPECULATIVE = "sglang.srt.speculative"
DRAFT_STREAM = fake_host.Stream(priority=-1).cuda_stream


@pytest.fixture
def host() -> Iterator[Host]:
    with made_host() as made:
        yield made


def whole_prompts(host: Host, count: int = 2) -> None:
    host.prefill(count)
    while any(request.unfinished for request in host.running):
        host.prefill(0)


def logged(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write launches of the engine and of its tree into the log."""
    engine = host.worker._draft_worker.engine
    for name in ("run", "tree", "warm_up"):
        plain = getattr(engine, name)

        def call(*arguments: Any, name: str = name, plain: Any = plain, **options: Any) -> Any:
            on = fake_host.Stream.current.name
            if name == "run":
                on = "draft" if arguments[1] == DRAFT_STREAM else "forward"
            LOG.append(f"{name} on {on}")
            return plain(*arguments, **options)

        monkeypatch.setattr(engine, name, call)


def bound(draft: Any) -> dict[int, torch.Tensor]:
    """The tensors that the engine has borrowed, by address."""
    return {tensor.data_ptr(): tensor for tensor in draft.engine._bound if isinstance(tensor, torch.Tensor)}


def test_one_cycle_in_order(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    logged(host, monkeypatch)
    whole_prompts(host, 1)
    assert LOG[-4:] == ["prefill on forward", "publish", "copy on forward", "event on forward"], "a first token waits"
    host.decode([])
    assert LOG == [
        "run on forward", "tree on forward", "verify on forward", "publish", "copy on forward", "event on forward",
    ], "no call of CUDA but the host's own event behind the copies"  # fmt: skip


def test_without_overlap_the_draft_starts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with made_host(Setting(overlap=False)) as host:
        logged(host, monkeypatch)
        whole_prompts(host, 1)
        assert LOG[-5:] == [
            "draft waits for forward's event", "run on draft", "event on draft", "copy on forward", "event on forward",
        ]  # fmt: skip
        assert LOG[-6] == "event on forward"


def test_a_host_that_goes_on_elsewhere_waits_for_the_draft(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_prompts(host)
    host.worker._stream.join()
    other = fake_host.Stream()
    other.name, other.cuda_stream = "other", 7
    stream = host.worker._stream
    monkeypatch.setattr(fake_host.Stream, "current", other)
    monkeypatch.setattr(stream, "_handle_now", lambda: 7)
    LOG.clear()
    assert stream.join() is other
    assert LOG == ["other waits for forward"]


def test_the_engine_is_warm_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for graphs in (True, False):
        with made_host(Setting(graphs=graphs)) as host:
            logged(host, monkeypatch)
            host.worker.init_cuda_graphs()
            assert (["warm_up on forward"] if graphs else []) == LOG
            assert ("draft_decode" in host.worker.graph_time_usage) is graphs


def test_the_fence_is_the_event_behind_the_results_copies(host: Host) -> None:
    """Recorded by the host right behind verification, and before the draft is enqueued on the same stream."""
    results: list[Any] = []
    plain, fence = host.worker.forward_batch_generation, host.worker.war_fastpath_runner
    host.worker.forward_batch_generation = lambda *a, **k: results.append(plain(*a, **k)) or results[-1]
    whole_prompts(host)
    host.decode([])
    assert fence.war_fastpath_read_done_event is fence.shared_read_done_event is results[-1].copy_done
    assert results[-1].copy_done.name == "forward's event"
    results[-1].delay_sample_func = lambda: None  # sampled, and copied, later: the host waits for all that is enqueued
    assert fence.war_fastpath_read_done_event is None
    results[-1].delay_sample_func, results[-1].copy_done = None, object()  # another thread copies
    assert fence.war_fastpath_read_done_event is None
    fence.war_fastpath_read_done_event = None  # as the host takes it
    results[-1].copy_done = torch.cuda.Event()
    assert fence.war_fastpath_read_done_event is None


def test_without_overlap_the_fence_is_an_event_of_its_own() -> None:
    with made_host(Setting(overlap=False)) as host:
        whole_prompts(host)
        assert host.worker.war_fastpath_runner.war_fastpath_read_done_event.name == "forward's event"


def test_what_the_host_relays_can_be_filtered(host: Host) -> None:
    whole_prompts(host, 3)
    rows = len(host.running)
    relayed: list[Any] = []
    plain = host.worker.forward_batch_generation
    host.worker.forward_batch_generation = lambda *a, **k: relayed.append(plain(*a, **k)) or relayed[-1]
    host.decode([])
    made = relayed[0].next_draft_input
    assert len(made.bonus_tokens) == len(made.topk_p) == len(made.topk_index) == rows
    assert made.hidden_states is None
    assert sorted(relayed[0].new_seq_lens.tolist()) == sorted(request.length for request in host.running)


def test_a_flush_forgets_all_drafts(host: Host) -> None:
    whole_prompts(host)
    host.worker.clear_cache_pool()
    assert LOG[-1] == "cpu waits for forward"
    assert host.worker._draft_worker.engine.results.drafted_for.tolist() == [-1] * (host.setting.slots + 1)


def test_memory_is_released_when_no_draft_runs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    logged(host, monkeypatch)
    whole_prompts(host)
    host.symbols["SchedulerWeightUpdaterManager"]().release_memory_occupation(None)
    assert LOG.index("run on forward") < LOG.index("cpu waits for forward") < LOG.index("release")
    host.worker.clear_cache_pool()  # as the host flushes its cache when K and V are gone
    for request in host.running:
        request.expected = fake_none()
    host.decode([])  # without a draft
    host.decode([])  # and with one again
    assert host.drafted > 0


@pytest.mark.parametrize("update", UPDATES)
def test_weights_change_when_no_draft_runs(update: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    logged(host, monkeypatch)
    whole_prompts(host)
    getattr(host.symbols["SchedulerWeightUpdaterManager"](), update)(None)
    assert LOG.index("run on forward") < LOG.index("cpu waits for forward") < LOG.index("update")


def fake_none() -> Any:
    from eaglex import reference

    return reference.Draft.none()


def test_what_the_host_asks_about_weights(host: Host) -> None:
    assert host.worker.update_weights_from_disk(None)[0] is True
    assert host.worker.update_weights_from_ipc(None)[0] is True
    assert host.worker.update_weights_from_tensor(None) == (True, "updated")
    assert LOG[-1] == "target's tensors"


def test_the_draft_is_the_checkpoint_and_the_targets_own_embedding(host: Host) -> None:
    draft, target = host.worker._draft_worker, host.worker.target_worker.model_runner
    assert bound(draft)[target.model.embed.data_ptr()].shape[0] == 2048, "the host's padding rows are no tokens"
    assert target.spec_aux_config.eagle_aux_hidden_state_layer_ids == [1, 3, 4]
    assert target.spec_aux_config.eagle_draft_num_layers is None
    assert draft.kv_bytes_per_token == 2 * 8 * 64 * 4
    sizing = host.symbols["DefaultPoolConfigurator"]()
    assert sizing._compute_cell_size(SimpleNamespace(is_draft_worker=False), 8) == 1000 + draft.kv_bytes_per_token
    assert draft.config.max_positions == CONTEXT


def test_inputs_are_kept_until_the_draft_has_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_host.Event, "query", lambda self: False)
    whole_prompts(host, 1)
    stream = host.worker._stream
    held, most = len(stream.kept), stream.KEPT
    for _ in range(most):
        host.decode([])
    assert len(stream.kept) == held + most
    monkeypatch.setattr(fake_host.Event, "query", lambda self: True)
    host.decode([])
    assert len(stream.kept) == 2, "the last two: nothing yet says that they have run"
    for _ in range(2 * most):
        host.decode([])
        assert len(stream.kept) <= most
    assert len(stream.kept) > 2, "not in each cycle: it asks CUDA"
    host.prefill(1)
    stream.join()
    assert len(stream.kept) <= 2, "a prompt's hidden states are many"


def test_a_target_that_does_not_capture_the_layers_is_named(host: Host) -> None:
    host.aux = lambda rows: torch.zeros(rows, 512)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"expected \[rows, 768\] of layers \[1, 3, 4\], got \[\d+, 512\]"):
        host.prefill(1)


def test_the_first_verification_is_looked_at_whatever_a_prefill_of_as_many_requests_has_shown(host: Host) -> None:
    host.prefill(2)
    while any(request.unfinished for request in host.running):
        host.prefill(0)
    host.worker._stream.join()
    plain = host.worker.verify

    def narrow(*arguments: Any) -> Any:
        result = plain(*arguments)
        result.logits_output.hidden_states = result.logits_output.hidden_states[:, :512]
        return result

    host.worker.verify = narrow
    with pytest.raises(ConfigError, match=r"expected \[rows, 768\] of layers \[1, 3, 4\], got \[\d+, 512\]"):
        host.decode([])


def test_layers_that_the_host_changes_before_capture_are_found(host: Host) -> None:
    host.worker.target_worker.model_runner.model.set_eagle3_layers_to_capture([2, 4, 5])
    with pytest.raises(ConfigError, match=r"expected layers_to_capture=\[2, 4, 5\], got \[3, 5, 6\]"):
        host.worker.init_attention_backends()


def test_a_pool_that_grows_after_capture_is_refused(host: Host) -> None:
    host.worker.target_worker.model_runner.token_to_kv_pool.post_capture_active = True
    with pytest.raises(ConfigError, match="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        host.worker.alloc_memory_pool(None, None, None)


def test_a_target_whose_embedding_cannot_be_shared_is_refused(host: Host) -> None:
    draft, model = host.worker._draft_worker, host.worker.target_worker.model_runner.model
    model.embed = model.embed.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"target's embed_tokens: expected .* torch.float32 .* torch.bfloat16"):
        draft.ranks.shared(model, ("embed_tokens",), 2048, torch.float32)
    model.embed = model.embed[:100].float()
    with pytest.raises(ConfigError, match="expected at least 2048 rows"):
        draft.ranks.shared(model, ("embed_tokens",), 2048, torch.float32)


def test_a_held_tensor_is_taken_where_the_draft_has_none(host: Host) -> None:
    held = {name: torch.zeros(2048, 256) for name in ("embed_tokens", "lm_head")}
    loaded = checkpoint.load(
        host.setting.draft, target=host.setting.draft.parent / "target", dtype=torch.float32, held=held
    )
    assert loaded.weights.embed_tokens is held["embed_tokens"]
    assert loaded.weights.lm_head is not held["lm_head"]


# ---- the host's sources ----------------------------------------------------------------------------------------------


def ours(file: str, name: str) -> ast.ClassDef:
    return next(n for n in parse(OURS / file).body if isinstance(n, ast.ClassDef) and n.name == name)


def exercised(host: Host) -> dict[str, Any]:
    """Every attribute that scheduler and components take from a worker, used as they use it."""
    worker, draft = host.worker, host.worker.draft_worker
    whole_prompts(host, 1)
    draft.draft_runner.device_timer = object()
    config = draft.draft_runner.model_config
    return {
        "forward_batch_generation": host.verified,
        "alloc_memory_pool": worker.req_to_token_pool.size,
        "init_attention_backends": worker.init_attention_backends(),
        "init_cuda_graphs": worker.init_cuda_graphs(),
        "clear_cache_pool": worker.clear_cache_pool(),
        "weight_load_time": worker.weight_load_time + 0.0,
        "graph_time_usage": dict(worker.graph_time_usage),
        "graph_memory_usage": dict(worker.graph_memory_usage),
        "war_fastpath_runner": worker.war_fastpath_runner.war_fastpath_read_done_event,
        "spec_v2_attn_backends": [getattr(b, "needs_cpu_seq_lens", True) for b in worker.spec_v2_attn_backends],
        "on_verify_complete_cpu": worker.on_verify_complete_cpu([1, 2], batch_size=2),
        "note_request_finished": worker.note_request_finished(rid="a", natural_stop=True),
        "speculative_num_steps": worker.speculative_num_steps + 0,
        "speculative_num_draft_tokens": worker.speculative_num_draft_tokens + 0,
        "update_weights_from_disk": worker.update_weights_from_disk(None),
        "update_weights_from_ipc": worker.update_weights_from_ipc(None),
        "update_weights_from_tensor": worker.update_weights_from_tensor(None),
        "draft_worker": (draft.draft_runner.token_to_kv_pool, config.spec_hidden_size, config.dtype,
                         draft.draft_runner.spec_algorithm.is_standalone()),
        "draft_runner": draft.draft_runner.check_weights(action="checksum", allow_quant_error=False),
        "_draft_worker": worker._draft_worker.draft_runner,
    }  # fmt: skip


def test_all_that_the_scheduler_touches_is_exercised(running_host: Path, host: Host) -> None:
    touched = touched_by_host(running_host) - set(OTHER_ALGORITHMS) - REFUSED_WITH_IT
    assert {"forward_batch_generation", "weight_load_time", "graph_memory_usage", "draft_worker"} <= touched
    assert touched - set(exercised(host)) == set()


def test_our_stand_in_of_the_base_class_inherits_nothing_that_the_host_has_not(running_host: Path) -> None:
    real = members(class_def(running_host, f"{SPECULATIVE}.base_spec_worker", "BaseSpecWorker"))
    fake = next(
        n for n in parse(Path(__file__).parent / "fake_engine_parts.py").body
        if isinstance(n, ast.ClassDef) and n.name == "BaseSpecWorker"
    )  # fmt: skip
    assert members(fake) <= real
    worker, draft = ours("engine_worker.py", "EaglexEngineWorker"), ours("draft_side.py", "DraftSide")
    assert attributes_of(worker, "self") <= real | members(worker)
    assert attributes_of(worker, "self._draft_worker") <= members(draft)


def test_methods_have_the_signatures_that_the_host_calls(running_host: Path) -> None:
    base = methods(class_def(running_host, f"{SPECULATIVE}.base_spec_worker", "BaseSpecWorker"))
    stock = base | methods(class_def(running_host, f"{SPECULATIVE}.eagle_worker_v2", "EAGLEWorkerV2"))
    made = methods(ours("engine_worker.py", "EaglexEngineWorker"))
    same = set(made) & set(stock)
    assert {"__init__", "forward_batch_generation", "verify", "alloc_memory_pool", "update_weights_from_disk"} <= same
    assert {name: parameters(made[name]) for name in same} == {name: parameters(stock[name]) for name in same}
    wanted = methods(class_def(running_host, f"{SPECULATIVE}.eagle_worker_v2", "EagleDraftWorker"))
    for file, owner in DRAFTS.items():
        draft = methods(ours(file, owner))
        for name in ("alloc_memory_pool", "init_attention_backends", "init_cuda_graphs", "draft"):
            if name in draft:
                assert parameters(draft[name]) == parameters(wanted[name])


DRAFTS = {
    "draft_side.py": "DraftSide", "engine_draft.py": "EngineDraft", "follower_draft.py": "FollowerDraft",
}  # fmt: skip


def keywords_of(file: str, function: str) -> tuple[int, set[str]]:
    """Positional arguments and keywords with which we call what is kept of the host."""
    for node in ast.walk(parse(OURS / file)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{function}":
            return len(node.args), {keyword.arg or "" for keyword in node.keywords}
    raise LookupError(function)


def test_verification_is_called_as_the_host_defines_it(running_host: Path) -> None:
    tree = parse(module_file(running_host, f"{SPECULATIVE}.eagle_worker_common"))
    verify = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "run_eagle_verify")
    count, given = keywords_of("engine_worker.py", "_run_verify")
    named = [name for name in parameters(verify) if name != "*"]
    assert count == 1
    assert given == {name.rstrip("=") for name in named[1:]}
    verified = class_def(running_host, f"{SPECULATIVE}.eagle_info", "EagleVerifyInput")
    needed = {
        node.target.id for node in verified.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is None
    }  # fmt: skip
    assert keywords_of("draft_side.py", "_verify_input")[1] == needed


FIELDS = {  # file, variable -> class of the host
    ("engine_worker.py", "batch"): ("sglang.srt.managers.schedule_batch", "ScheduleBatch"),
    ("draft_side.py", "batch"): ("sglang.srt.managers.schedule_batch", "ScheduleBatch"),
    ("translate.py", "batch"): ("sglang.srt.managers.schedule_batch", "ScheduleBatch"),
    ("engine_worker.py", "result"): ("sglang.srt.managers.utils", "GenerationBatchResult"),
    ("verify_input.py", "kept"): ("sglang.srt.layers.attention.verify_mask", "VerifyMask"),
    ("engine_draft.py", "model_config"): ("sglang.srt.configs.model_config", "ModelConfig"),
    ("engine_draft.py", "args"): ("sglang.srt.server_args", "ServerArgs"),
    ("engine_arguments.py", "server_args"): ("sglang.srt.server_args", "ServerArgs"),
    ("draft_memory.py", "model_runner"): ("sglang.srt.model_executor.model_runner", "ModelRunner"),
    ("draft_side.py", "runner"): ("sglang.srt.model_executor.model_runner", "ModelRunner"),
    ("draft_memory.py", "sizing"): ("sglang.srt.model_executor.pool_configurator", "DefaultPoolConfigurator"),
}


@pytest.mark.parametrize(("place", "owner"), FIELDS.items(), ids=lambda item: ".".join(item))
def test_fields_that_we_use_exist(running_host: Path, place: tuple[str, str], owner: tuple[str, str]) -> None:
    used = attributes_of(parse(OURS / place[0]), place[1])
    assert used, f"{place[0]} no longer uses {place[1]}"
    assert used <= members(class_def(running_host, *owner))


def test_refused_flags_are_the_hosts(running_host: Path) -> None:
    from eaglex.hosts.sglang import engine_arguments

    known = members(class_def(running_host, "sglang.srt.server_args", "ServerArgs"))
    assert {option for option, _, _ in engine_arguments.REFUSED} <= known


def test_every_target_of_the_host_says_what_it_captures(running_host: Path) -> None:
    """Why the list can be read back: a model keeps it as `layers_to_capture`, or hands the setter on."""
    found = 0
    for file in sorted((running_host / "srt" / "models").glob("*.py")):
        for owner in (node for node in parse(file).body if isinstance(node, ast.ClassDef)):
            setter = methods(owner).get("set_eagle3_layers_to_capture")
            if setter is not None:
                text = ast.unparse(setter)
                assert "layers_to_capture = " in text or ".set_eagle3_layers_to_capture(" in text, file.name
                found += 1
    assert found >= 25


def test_the_aux_layers_are_set_before_the_target_is_captured(running_host: Path) -> None:
    """The host's start: draft worker, pools, the list once more, backends, graphs."""
    scheduler = methods(class_def(running_host, "sglang.srt.managers.scheduler", "Scheduler"))
    calls = [ast.unparse(n.func) for n in ast.walk(scheduler["init_model_worker"]) if isinstance(n, ast.Call)]
    order = ["maybe_init_draft_worker", "init_memory_pools", "init_all_attention_backends", "init_all_cuda_graphs"]
    places = [calls.index(f"self.{name}") for name in order]
    assert places == sorted(places)
    runner = methods(class_def(running_host, "sglang.srt.model_executor.model_runner", "ModelRunner"))
    assert "eagle_aux_hidden_state_layer_ids=self.spec_aux_config.eagle_aux_hidden_state_layer_ids" in ast.unparse(
        runner["init_attention_backends"]
    )


def test_inputs_are_kept_where_the_host_has_no_event_to_ask(host: Host) -> None:
    whole_prompts(host, 1)
    stream, plain = host.worker._stream, host.worker.forward_batch_generation

    def copied_by_another_thread(*arguments: Any, **options: Any) -> Any:
        result = plain(*arguments, **options)
        result.copy_to_cpu = lambda **_: setattr(result, "copy_done", object())
        return result

    host.worker.forward_batch_generation = copied_by_another_thread
    for _ in range(3 * stream.KEPT):
        host.decode([])
    assert 3 <= len(stream.kept) <= stream.KEPT + 1
