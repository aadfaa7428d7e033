"""eaglex's own options, what is refused at start with its engine, auxiliary layers, and the memory that is charged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_source import class_def, members
from support.models import make_config, random_weights

from eaglex import doctor
from eaglex.aux_layers import AuxConvention
from eaglex.errors import ConfigError
from eaglex.hosts.sglang import algorithm, arguments, aux_capture, compat, draft_memory, engine_arguments, options
from eaglex.hosts.sglang.options import Drafter, Options, Placement
from eaglex.hot_vocab import HotVocab
from eaglex.packed import Auto, DraftQuant, Precision
from eaglex.quantize import quantize


def test_no_options_run_the_engine() -> None:
    assert options.read({}) == Options()
    assert options.read({options.VARIABLE: " "}).drafter is Drafter.ENGINE


def test_options_are_read() -> None:
    written = {
        "drafter": "engine", "placement": "dedicated", "aux_layer_ids": [1, 3], "convention": "capture_before",
        "stop_below": 0.1, "max_rows": 512, "token_table_bytes": 0, "pausing": True, "join_deadline": 20,
        "deadline": 2.5, "transport": "nccl",
        "draft_quant": "head=int4,mlp=fp8", "hot_vocab": "9:a.json", "drafter_deadline": 0.25,
        "drafter_device": "cuda:3",
    }  # fmt: skip
    assert options.read({options.VARIABLE: json.dumps(written)}) == Options(
        drafter=Drafter.ENGINE,
        placement=Placement.DEDICATED,
        aux_layer_ids=(1, 3),
        convention=AuxConvention.CAPTURE_BEFORE,
        stop_below=0.1,
        max_rows=512,
        token_table_bytes=0,
        pausing=True,
        join_deadline=20.0,
        deadline=2.5,
        transport="nccl",
        drafter_deadline=0.25,
        drafter_device="cuda:3",
        draft_quant=DraftQuant(head=Precision.INT4, mlp=Precision.FP8),
        hot_vocab=HotVocab(size=9, file="a.json"),
    )
    assert set(written) == {field for field in Options.__dataclass_fields__ if field != "DEFAULT_ROWS"}


def test_doctor_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(options.VARIABLE, '{"drafter": "engine"}')
    (found,) = doctor.sglang_options()
    assert found.verdict is doctor.Verdict.OK
    for name in Options.__dataclass_fields__.keys() - {"DEFAULT_ROWS"}:
        assert f"{name}=" in found.text, name
    assert "drafter=engine" in found.text
    monkeypatch.setenv(options.VARIABLE, '{"drafter": "engines"}')
    (found,) = doctor.sglang_options()
    assert found.verdict is doctor.Verdict.FAIL
    assert "'host' or 'engine'" in found.text


WRONG = {
    '{"pausing": true, "pausing": false}': "twice", "[" * 10**5: "a JSON object",
    "{": "a JSON object", "[]": "a JSON object", '{"draft": 1}': "'draft'",
    '{"drafter": "stock"}': "'host' or 'engine'",
    '{"placement": 0}': "placement", '{"aux_layer_ids": [1.5]}': "a list of integers", '{"aux_layer_ids": []}': "aux",
    '{"convention": "both"}': "convention", '{"stop_below": 1}': "stop_below", '{"stop_below": "a"}': "a number",
    '{"pausing": 1}': "true or false",
    '{"drafter_deadline": 0}': "drafter_deadline",
    '{"max_rows": -1}': "max_rows", '{"max_rows": true}': "an integer", '{"deadline": 0}': "deadline",
    '{"hot_vocab": "0"}': "N >= 1", '{"hot_vocab": 9}': "a text as of --hot-vocab",
    '{"draft_quant": "int3"}': "draft_quant", '{"draft_quant": 8}': "a text",
    '{"join_deadline": "soon"}': "a number", '{"transport": "tcp"}': "'p2p' or 'mailbox' or 'nccl'",
}  # fmt: skip


@pytest.mark.parametrize(("text", "named"), WRONG.items())
def test_a_wrong_option_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=options.VARIABLE) as caught:
        options.read({options.VARIABLE: text})
    assert named in str(caught.value)


def given(**changed: Any) -> SimpleNamespace:
    values = {refused.option: refused.allowed for refused in arguments.REFUSED}
    values |= {option: allowed[0] for option, allowed, _ in engine_arguments.REFUSED}
    values |= {
        "speculative_draft_model_path": "a/head", "speculative_draft_model_revision": None, "trust_remote_code": False,
        "speculative_num_steps": 5, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6,
        "quantization": None, "speculative_draft_model_quantization": None,
        "chunked_prefill_size": 8192, "speculative_adaptive": False, "speculative_algorithm": "EAGLEX",
        "tp_size": 1, "dp_size": 1, "base_gpu_id": 0, "gpu_id_step": 1,
    }  # fmt: skip
    return SimpleNamespace(**(values | changed))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(options.VARIABLE, '{"drafter": "engine"}')
    monkeypatch.setattr(compat, "installed_version", lambda: compat.RUN_VERSIONS[0])
    monkeypatch.setattr(compat, "symbol", lambda name: lambda path, **_: SimpleNamespace(architectures=["Llama"]))
    return monkeypatch


REFUSED = {
    "nnodes": 2, "speculative_draft_model_quantization": "awq",
    "speculative_draft_load_format": "dummy", "speculative_draft_attention_backend": "triton", "pp_size": 2,
    "enable_hierarchical_cache": True, "disaggregation_mode": "prefill",
    "enable_dp_attention": True, "enable_two_batch_overlap": True, "enable_multi_layer_eagle": True,
}  # fmt: skip


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("option", "value"), REFUSED.items())
def test_flags_that_are_refused_with_the_engine(option: str, value: Any) -> None:
    arguments.refuse(given())
    with pytest.raises(ValueError, match=option) as caught:
        arguments.refuse(given(**{option: value}))
    assert repr(value) in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.usefixtures("engine")
def test_bits_of_the_draft_are_the_options_else_the_hosts_flag() -> None:
    fp8, int4 = DraftQuant.parse("fp8"), DraftQuant.every(Precision.INT4)
    of = engine_arguments.quant_of
    for flag, wanted in ((None, None), ("unquant", None), ("fp8", fp8), ("modelopt", None)):
        server_args = given(speculative_draft_model_quantization=flag, quantization="modelopt")
        arguments.refuse(server_args)
        assert of(server_args, Options()) == wanted
        assert of(server_args, Options(draft_quant=int4)) == int4
        assert of(server_args, options.read({options.VARIABLE: '{"draft_quant": "auto"}'})) is Auto.AUTO


def test_every_flag_of_the_engine_is_tested() -> None:
    assert {option for option, _, _ in engine_arguments.REFUSED} <= set(REFUSED)


def test_a_dedicated_drafter_takes_a_gpu_that_no_rank_has(engine: pytest.MonkeyPatch) -> None:
    def where(gpus: int, **changed: Any) -> str:
        engine.setattr("torch.cuda.device_count", lambda: gpus)
        arguments.refuse(given(**changed))
        return engine_arguments.drafter_device_of(given(**changed), options.read())

    engine.setenv(options.VARIABLE, '{"drafter": "engine", "placement": "dedicated"}')
    assert where(2) == "cuda:1"
    assert where(8, tp_size=4) == "cuda:4"
    assert where(8, tp_size=2, base_gpu_id=1, gpu_id_step=2) == "cuda:0"
    with pytest.raises(ValueError, match=r"placement='dedicated'.*on 8 GPUs with tp_size=8"):
        where(8, tp_size=8)
    engine.setenv(options.VARIABLE, '{"placement": "dedicated", "drafter_device": "cuda:0"}')
    assert where(1) == "cuda:0"
    engine.setenv(options.VARIABLE, '{"placement": "dedicated", "drafter_device": "cuda:2"}')
    with pytest.raises(ValueError, match="drafter_device='cuda:2': 2 GPUs"):
        where(2)
    engine.setenv(options.VARIABLE, '{"drafter_device": "gpu 1"}')
    with pytest.raises(ConfigError, match="drafter_device: expected 'cuda:N'"):
        options.read()
    engine.delenv(options.VARIABLE)
    with pytest.raises(ValueError, match="device='cpu'"):  # the worker as a whole needs a GPU
        arguments.refuse(given(device="cpu"))


def test_adaptive_steps_are_let_through_for_a_chain_of_the_engine(engine: pytest.MonkeyPatch) -> None:
    """The host turns them off by name; its own answer stays what it was for every other algorithm."""
    put: dict[str, Any] = {}
    engine.setattr(compat, "replace", put.__setitem__)
    symbols = {"get_config": lambda path, **_: SimpleNamespace(architectures=["Llama"]),
               "adaptive_unsupported_reason": lambda server_args: "the host's reason"}  # fmt: skip
    engine.setattr(compat, "symbol", symbols.__getitem__)
    adaptive = given(speculative_adaptive=True, max_speculative_num_draft_tokens=8)
    arguments.refuse(adaptive)
    reason = put["adaptive_unsupported_reason"]
    assert (reason(adaptive), reason(given(speculative_algorithm="NGRAM"))) == (None, "the host's reason")
    assert engine_arguments.speculation_of(adaptive, options.read()).num_steps == 7, "the most that may be asked for"
    with pytest.raises(ValueError, match=r"speculative_eagle_topk=4.*speculative_adaptive=True"):
        arguments.refuse(given(speculative_adaptive=True, speculative_eagle_topk=4))
    engine.setenv(options.VARIABLE, '{"drafter": "engine", "pausing": true}')
    with pytest.raises(ValueError, match=r"pausing=true.*speculative_adaptive=True"):
        arguments.refuse(adaptive)
    engine.setenv(options.VARIABLE, '{"drafter": "host"}')
    with pytest.raises(ValueError, match="speculative_adaptive=True"):
        arguments.refuse(adaptive)


@pytest.mark.parametrize(("chosen", "named"), [
    ('{"drafter_device": "cuda:1"}', "drafter_device with placement='rank0'"),
    ('{"drafter_deadline": 2}', "drafter_deadline with placement='rank0'"),
    ('{"drafter": "host", "placement": "dedicated"}', "placement with drafter='host'"),
    ('{"drafter": "host", "pausing": true}', "pausing with drafter='host'"),
    ('{"drafter": "host", "draft_quant": "fp8"}', "draft_quant with drafter='host'"),
])  # fmt: skip
def test_an_option_that_nothing_would_read_is_refused(engine: pytest.MonkeyPatch, chosen: str, named: str) -> None:
    engine.setenv(options.VARIABLE, chosen)
    with pytest.raises(ValueError, match=f"EAGLEX does not support {options.VARIABLE} {named}"):
        arguments.refuse(given())


@pytest.mark.parametrize("name", [name for name, _ in engine_arguments.HOST_VARIABLES])
def test_variables_of_the_host_that_a_dedicated_drafter_cannot_do_with(engine: pytest.MonkeyPatch, name: str) -> None:
    engine.setattr("torch.cuda.device_count", lambda: 2)
    engine.setenv(name, "true")
    arguments.refuse(given())
    engine.setenv(options.VARIABLE, '{"placement": "dedicated"}')
    with pytest.raises(ValueError, match=f"{name}=true"):
        arguments.refuse(given())
    engine.setenv(name, "0")
    arguments.refuse(given())


def test_these_variables_are_the_hosts(running_host: Path) -> None:
    known = members(class_def(running_host, "sglang.srt.environ", "Envs"))
    assert {name for name, _ in engine_arguments.HOST_VARIABLES} <= known


def test_wrong_options_stop_the_launch(engine: pytest.MonkeyPatch) -> None:
    engine.setenv(options.VARIABLE, '{"drafter": "engines"}')
    with pytest.raises(ValueError, match="drafter"):
        arguments.refuse(given())


@pytest.mark.usefixtures("engine")
def test_how_far_the_engine_drafts_is_the_hosts_flags() -> None:
    arguments.complete(chain := given())
    assert chain.speculative_draft_attention_backend is None, "the engine needs none of the host's backends"
    tree = engine_arguments.speculation_of(
        given(speculative_num_steps=4, speculative_eagle_topk=4, speculative_num_draft_tokens=16), options.read()
    )
    assert (tree.num_steps, tree.topk, tree.num_draft_tokens) == (4, 4, 16)
    with pytest.raises(ValueError, match="speculative_num_steps=17") as caught:
        arguments.complete(given(speculative_num_steps=17, speculative_num_draft_tokens=18))
    assert str(caught.value).endswith(".")


def test_only_the_engine_keeps_drafted_tokens_out_of_the_hosts_slots(engine: pytest.MonkeyPatch) -> None:
    class Enum:
        EAGLE3 = None

        def has_draft_kv(self) -> bool:
            raise AssertionError("the enum's own answer is not asked for")

        def handle_server_args(self, server_args: Any) -> None:
            pass

    engine.setattr(compat, "symbol", {"SpeculativeAlgorithm": Enum, "CustomSpecAlgo": object}.__getitem__)
    made = algorithm.algorithm_class()()
    assert made.has_draft_kv() is False
    engine.setenv(options.VARIABLE, '{"drafter": "host"}')
    assert made.has_draft_kv() is True


def test_rows_of_a_launch() -> None:
    def rows(chunk: int | None, asked: int = 0, batch: int = 48) -> int:
        return engine_arguments.max_rows_of(
            given(chunked_prefill_size=chunk), Options(max_rows=asked), max_batch=batch, num_draft_tokens=6
        )

    assert (rows(2048), rows(16384), rows(-1), rows(None)) == (2048, 4096, 4096, 4096)
    assert (rows(2048, asked=300), rows(2048, asked=10), rows(1, batch=1000)) == (300, 288, 6000)


class Model(torch.nn.Module):
    """A target that takes its list in one of the host's ways; `names` says what it makes of the argument."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner = way, torch.nn.Module()

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        plus = [i + 1 for i in layer_ids]
        kept = {
            "output": plus,
            "guesses by the first": plus if layer_ids[0] == 1 else list(layer_ids),
            "keeps": list(layer_ids),
            "ignores": [2, 16, 29],
        }
        self.inner.layers_to_capture = kept[self.way]


@pytest.mark.parametrize(
    ("way", "ids", "argument"),
    [
        ("output", [1, 15, 28], [1, 15, 28]),
        ("guesses by the first", [1, 15, 28], [1, 15, 28]),
        ("guesses by the first", [2, 30, 57], [3, 31, 58]),
        ("keeps", [2, 30, 57], [3, 31, 58]),
    ],
)
def test_the_target_captures_the_outputs_that_were_asked_for(way: str, ids: list[int], argument: list[int]) -> None:
    model = Model(way)
    assert aux_capture.set_layers(model, ids) == argument
    assert aux_capture.captured(model) == [i + 1 for i in ids]


def test_a_target_that_captures_others_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected layers_to_capture=\[3, 31, 58\].* got \[2, 16, 29\]"):
        aux_capture.set_layers(Model("ignores"), [2, 30, 57])
    with pytest.raises(ConfigError, match="expected the method set_eagle3_layers_to_capture"):
        aux_capture.set_layers(torch.nn.Module(), [1, 2, 3])
    with pytest.raises(ConfigError, match="ascending"):
        aux_capture.set_layers(Model("output"), [1, 28, 15])
    with pytest.raises(ConfigError, match="3 x 4096.*hidden_size is 5120"):
        aux_capture.check_width(3, 4096, model_hidden=5120)


def test_the_bytes_of_a_token() -> None:
    config = make_config(num_layers=2, num_heads=8, num_kv_heads=4, head_dim=16)
    assert draft_memory.kv_bytes_per_token(config, torch.bfloat16) == 2 * 2 * 4 * 16 * 2
    assert draft_memory.kv_bytes_per_token(config, torch.float32) == 2 * 2 * 4 * 16 * 4
    weights = random_weights(config)
    whole = sum(tensor.nbytes for _, tensor in weights.named())
    assert draft_memory.own_weight_bytes(weights, ()) == whole
    assert draft_memory.own_weight_bytes(weights, ("embed_tokens",)) == whole - weights.embed_tokens.nbytes
    four = quantize(weights, DraftQuant.parse("head=int4"))
    added, rows = four.lm_head.nbytes, weights.lm_head.nbytes
    assert draft_memory.own_weight_bytes(four, ()) == whole + added
    assert draft_memory.own_weight_bytes(four, ("lm_head_rows",)) == whole + added - rows


def runner_of(**changed: Any) -> Any:
    values = {"is_hybrid_swa": False, "model_config": None}
    return SimpleNamespace(**values | changed, spec_aux_config=SimpleNamespace(eagle_draft_num_layers=3))


def test_the_host_is_charged_once_and_for_its_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Configurator:
        def _compute_cell_size(self, kvc: Any, num_layers: int) -> int:
            return 1000 * num_layers

    hybrid: Any = None
    monkeypatch.setattr(
        compat, "symbol", {"DefaultPoolConfigurator": Configurator, "mambaish_config": lambda _: hybrid}.__getitem__
    )
    runner = runner_of()
    draft_memory.charge_kv(runner, 77)
    draft_memory.charge_kv(runner, 88)  # a second server in the process: its own figure
    sized = Configurator()._compute_cell_size
    assert sized(SimpleNamespace(is_draft_worker=False), 4) == 4088
    assert sized(SimpleNamespace(is_draft_worker=True), 4) == 4000
    assert runner.spec_aux_config.eagle_draft_num_layers is None, "the host would add its own estimate"
    with pytest.raises(ConfigError, match="sliding-window"):
        draft_memory.charge_kv(runner_of(is_hybrid_swa=True), 77)
    hybrid = object()
    with pytest.raises(ConfigError, match="hybrid"):
        draft_memory.charge_kv(runner, 77)
