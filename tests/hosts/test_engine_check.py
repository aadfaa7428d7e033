"""What tools/engine_check.py calls equal, and the files that it makes for the times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_check
import pytest
import torch
from engine_check import ENGINE, HOST, LANES, judged, lane_environment, table, write_timed_weights
from test_socket_check import served

from eaglex import checkpoint
from eaglex.hosts.sglang import options
from eaglex.hosts.sglang.options import Drafter

SHAPE = {"hidden": 128, "vocab": 512, "draft_vocab": 64, "intermediate": 256, "heads": 2, "kv_heads": 1}


def judged_after(lane: str, change: Any) -> dict[str, Any]:
    stock, ours = served("EAGLE3"), served("EAGLEX")
    for one in ours["passes"]:
        change(one["requests"])
    row = judged("chain", stock, ours, lane)
    assert row["case"] in table({"cases": [row]})[2]
    return row


def same(requests: list[dict[str, Any]]) -> None:
    pass


def another_token(requests: list[dict[str, Any]]) -> None:
    requests[1]["ids"][2] = 9


def fewer_accepted(requests: list[dict[str, Any]]) -> None:
    requests[1]["correct"] -= 1


def failed(requests: list[dict[str, Any]]) -> None:
    requests[0] = {"error": "died"}


@pytest.mark.parametrize("lane", [HOST, ENGINE])
def test_equal_is_equal(lane: str) -> None:
    assert judged_after(lane, same)["equal"]


@pytest.mark.parametrize("lane", [HOST, ENGINE])
@pytest.mark.parametrize("change", [another_token, failed, fewer_accepted])
def test_a_difference_is_seen(lane: str, change: Any) -> None:
    assert not judged_after(lane, change)["equal"]


def test_the_engine_may_accept_a_little_otherwise() -> None:
    """1 of 300 accepted tokens: within 1 % for the engine; the comparison worker owes equal counts."""

    def one_fewer(requests: list[dict[str, Any]]) -> None:
        requests[1]["correct"] -= 1

    for lane, equal in ((ENGINE, True), (HOST, False)):
        stock, ours = served("EAGLE3"), served("EAGLEX")
        for result in (stock, ours):
            for one in result["passes"]:
                for request in one["requests"][:3]:
                    request["correct"] = 100
        one_fewer(ours["passes"][0]["requests"])
        assert judged("chain", stock, ours, lane)["equal"] is equal


def test_a_lane_that_did_not_serve_is_missing() -> None:
    row = {"case": "chain", "lane": ENGINE, "equal": False, "missing": [ENGINE]}
    assert "not served: EAGLEX engine" in table({"cases": [row]})[2]


def test_only_one_lane_runs_the_engine() -> None:
    chosen = {lane: options.read(lane_environment(lane)).drafter for lane in LANES}
    assert chosen == {"EAGLE3": Drafter.HOST, HOST: Drafter.HOST, ENGINE: Drafter.ENGINE}
    assert [engine_check.algorithm_of(lane) for lane in LANES] == ["EAGLE3", "EAGLEX", "EAGLEX"]


def test_the_files_for_the_times_are_what_the_loader_reads(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_timed_weights(target, draft, SHAPE)
    fields = {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    for folder, more in ((target, {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}),
                         (draft, {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
                                  "draft_vocab_size": 64})):  # fmt: skip
        (folder / "config.json").write_text(json.dumps(fields | more))
    held = {"embed_tokens": torch.zeros(512, 128, dtype=torch.bfloat16)}
    loaded = checkpoint.load(draft, target=target, max_positions=4096, held=held)
    assert loaded.weights.embed_tokens is held["embed_tokens"]
    assert loaded.aux.output_ids == (1, 3, 4)
    assert loaded.weights.fc.float().std() > 0.01
