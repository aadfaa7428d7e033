"""tools/serve_bench.py without a GPU: the files that its engine reads, its rows, and the probe's stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import serve_bench
import torch
from serve_parts import probe
from serve_parts.weights import write_weights

from eaglex import checkpoint

SHAPE = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip


def test_the_files_are_what_the_loader_reads(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder, more in ((target, {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}),
                         (draft, {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
                                  "draft_vocab_size": 64})):  # fmt: skip
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPE | more))
    write_weights(target, draft, SHAPE, 64)
    held = {"embed_tokens": torch.zeros(512, 128, dtype=torch.bfloat16)}
    loaded = checkpoint.load(draft, target=target, max_positions=4096, held=held)
    assert loaded.weights.embed_tokens is held["embed_tokens"]
    assert loaded.aux.output_ids == (1, 3, 4)
    assert loaded.weights.fc.float().std() > 0.01


def a_round(tok_s: float, extend: float) -> dict[str, Any]:
    stages = {"draft": 10.0, "extend": extend, "verify": 1900.0, "host": 80.0, "late": 20.0}
    return {
        "batches": {"1": [{"tok_s": tok_s, "cycle_us": 3e6 / tok_s, "accept_length": 3.0}]},
        "first": [{"first_token_ms": {"512": ms}, "one_token_ms": {"512": ms + 1}} for ms in (9.0, 30.0, 8.0)],
        "probe": {
            "stages": {name: {"1": {"median": us, "n": 9}} for name, us in stages.items()}, "gpu_bytes": 2 * 10**9,
            "paused_cycles": 4,
        },
    }  # fmt: skip


def test_a_row_is_the_median_over_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHES", "1")
    rounds = [a_round(900, 1200), a_round(1000, 1000), a_round(700, 1100)]
    (row,) = serve_bench.rows_of("eaglex", rounds, startup=40.0, commit="abc")
    expected = {
        "engine": "eaglex", "tok_s": 900, "draft_us": 1110.0, "extend_us": 1100, "host_us": 100.0, "memory_gb": 2.0,
        "num_steps": 5, "topk": 1, "placement": "rank0", "commit": "abc", "paused_cycles": 4, "ttft_ms": 9.0,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    (none,) = serve_bench.rows_of("none", [a_round(450, 1) | {"probe": {}}], startup=30.0, commit="abc")
    assert (none["draft_us"], none["host_us"], none["num_steps"]) == (None, None, 0)
    (stock,) = serve_bench.rows_of("eagle3", [a_round(600, 1)], startup=30.0, commit="abc")
    lines = serve_bench.table({"rows": serve_bench.compared([row, stock, none])})
    assert lines[2].endswith("| 1.500 |")
    assert lines[4].endswith("| 0.750 |")
    assert (row["rounds"], row["ratios"]) == ([900, 1000, 700], [1.5])


def test_the_ratio_is_that_of_turns_beside_each_other() -> None:
    """A host that is slow for a while is slow for both: medians of each alone would say 0.5."""
    rows = [
        {"engine": "fp8", "batch": 1, "rounds": [1200, 500, 500, 480, 1300]},
        {"engine": "eagle3", "batch": 1, "rounds": [1000, 400, 1000, 400, 1000]},
        {"engine": "none", "batch": 4, "rounds": [10]},
    ]
    assert [row["ratio"] for row in serve_bench.compared(rows)] == [1.2, 1.0, None]


ENGINE = """
import json, pathlib, sys, time
name, out = sys.argv[2], pathlib.Path(sys.argv[3])
out.with_suffix(".ready").write_text(json.dumps({"startup_s": 1.5}))
for number in range(99):
    while not out.with_suffix(f".go{number}").is_file():
        time.sleep(0.01)
    asked = json.loads(out.with_suffix(f".go{number}").read_text())
    found = {"tok_s": (90 if name == "eagle3" else 99) * asked, "cycle_us": 1.0, "accept_length": 3.0} \
        if isinstance(asked, int) else {"first_token_ms": {"512": 2.0}, "one_token_ms": {"512": 3.0}}
    if asked == "probe":
        found = {}
    if name == "none" and number == 8:
        sys.exit(1)
    part = out.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(out.with_suffix(f".round{number}"))
"""


def test_engines_take_turns_batch_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three turns at batch 1, one at 4, two of first tokens, the probe; an engine that ends has its whole rounds."""
    for name, value in {"BATCHES": "1,4", "TURNS": "3,1", "FIRST_TOKENS": "2", "SECONDS": "40"}.items():
        monkeypatch.setenv(name, value)
    made = serve_bench.Run(tmp_path, ["eaglex", "eagle3", "none"])
    given, order = made.given, []
    monkeypatch.setattr(made, "given", lambda name, what: (order.append((name, what)), given(name, what))[1])
    tool = tmp_path / "engine.py"
    tool.write_text(ENGINE)
    with made.running(str(tool)) as all_up:
        assert all_up
        made.round(0)
        made.round(1)
    assert [name for name, _ in order[:6]] == ["eaglex", "eagle3", "none", "none", "eagle3", "eaglex"]
    assert [what for name, what in order[:21] if name == "eagle3"] == [
        1,
        1,
        1,
        4,
        "first tokens",
        "first tokens",
        "probe",
    ]
    rows = {(row["engine"], row["batch"]): row for row in made.report({"commit": "abc"})["rows"]}
    assert rows["eaglex", 1]["rounds"] == [99] * 6
    assert (rows["eaglex", 4]["ttft_ms"], rows["eaglex", 4]["one_token_ms"]) == (2.0, {"512": 3.0})
    assert (rows["eaglex", 4]["ratios"], rows["none", 4]["rounds"]) == ([1.1, 1.1], [396])
    assert "eagle3 round 1" in capsys.readouterr().out


def test_turns_are_one_number_or_one_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHES", "1,4,16")
    assert serve_bench.turns_of(4) == 1
    monkeypatch.setenv("TURNS", "5,2,1")
    assert [serve_bench.turns_of(batch) for batch in (1, 4, 16)] == [5, 2, 1]
    monkeypatch.setenv("TURNS", "5,2")
    with pytest.raises(SystemExit, match="TURNS: expected one number, or 3 as BATCHES has"):
        serve_bench.turns_of(1)


@pytest.mark.parametrize("name", serve_bench.ENGINES)
def test_an_engine_has_its_own_options(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLEX_OPTIONS", '{"max_rows": 512}')
    monkeypatch.setenv("BEFORE", "/other")
    monkeypatch.setenv("PYTHONPATH", "/here")
    found = serve_bench.process_of(name, tmp_path, 0).environment
    assert found["SGLANG_SIMULATE_ACC_LEN"] == ("1" if name == "pausing" else "3")
    assert ("SERVE_PROBE" in found) is (name != "none")
    wanted = {
        "eaglex": {"drafter": "engine"}, "pausing": {"drafter": "engine", "pausing": True},
        "socket": {"drafter": "host"}, "fp8": {"drafter": "engine", "draft_quant": "fp8"},
        "int4": {"drafter": "engine", "draft_quant": "int4"},
        "dedicated": {"drafter": "engine", "placement": "dedicated"}, "before": {"drafter": "engine"},
    }.get(name)  # fmt: skip
    assert found["SERVE_PROBE_ENGINE"] == ("eaglex" if name == "before" else name)
    assert found.get("PYTHONPATH") == ("/other:/here" if name == "before" else None)
    chosen = json.loads(found["EAGLEX_OPTIONS"]) if "EAGLEX_OPTIONS" in found else None
    assert chosen == (wanted | {"max_rows": 512} if wanted else None)


def test_the_probe_counts_a_forward_without_its_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(probe.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(probe, "rows", [])

    class Mode:
        def is_extend(self) -> bool:
            return False

    class Batch:
        reqs, forward_mode, is_extend_in_batch = (1, 2), Mode(), False

    class Worker:
        def verify(self) -> None:
            clock[0] += 5e-3

        def forward_batch_generation(self, batch: Batch, on_publish: Any = None) -> None:
            clock[0] += 1e-4
            self.verify()
            clock[0] += 3e-5
            on_publish()

    probe.verification(Worker)
    probe.forward(Worker, "/nowhere")

    def publish() -> None:
        clock[0] += 1e-2

    for _ in range(2):
        Worker().forward_batch_generation(Batch(), on_publish=publish)
    expected = {"host": 130, "before": 100, "after": 30, "verify_cpu": 5000}
    assert {row[0] for row in probe.rows} == set(expected)
    assert all(row[1] == 2 and row[2] == pytest.approx(expected[row[0]]) for row in probe.rows)
