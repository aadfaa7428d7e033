"""One token per request is verified with the attention backend's decode kernels, and nothing else of it changes."""

from __future__ import annotations

import ast
import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_source import class_def, methods, parameters

from eaglex.hosts.sglang import compat, root_decode

TRITON, BASE = (f"sglang.srt.layers.attention.{name}" for name in ("triton_backend", "base_attn_backend"))


class Mode(enum.Enum):
    DECODE = enum.auto()
    EXTEND = enum.auto()
    TARGET_VERIFY = enum.auto()

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY


class TritonAttnBackend:
    """As the host's: attention over what its metadata names, by the mode of the batch."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.calls.append(("eager", forward_batch.forward_mode, forward_batch.spec_info, forward_batch.seq_lens_sum))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.calls.append((in_capture, forward_batch.forward_mode, forward_batch.spec_info, forward_batch.seq_lens))

    def forward(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> str:
        return f"plain {forward_batch.forward_mode.name} {save_kv_cache}"

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> str:
        return f"decode {save_kv_cache}"


class OtherBackend(TritonAttnBackend):
    pass


def batch(mode: Mode) -> Any:
    return SimpleNamespace(
        forward_mode=mode, spec_info="verify", seq_lens=torch.tensor([4, 9]), seq_lens_cpu=None, seq_lens_sum=13,
        batch_size=2,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "symbol", {"ForwardMode": Mode}.__getitem__)


def test_a_verification_of_one_token_is_a_decode_of_one_token_more() -> None:
    backend, given = TritonAttnBackend(), batch(Mode.TARGET_VERIFY)
    assert root_decode.decode_roots(backend)
    backend.init_forward_metadata_out_graph(given, in_capture=True)
    backend.init_forward_metadata(given)
    captured, eager = backend.calls
    assert captured[:3] == (True, Mode.DECODE, None)
    assert captured[3].tolist() == [5, 10], "decode's lengths hold the token that is written"
    assert eager == ("eager", Mode.DECODE, None, 15)
    assert backend.forward(1, 2, 3, 4, given, save_kv_cache=False) == "decode False"
    assert given.seq_lens.tolist() == [4, 9], "the host reads them afterwards"
    assert (given.forward_mode, given.spec_info, given.seq_lens_sum) == (Mode.TARGET_VERIFY, "verify", 13)


def test_prompts_pass_as_they_are() -> None:
    backend, given = TritonAttnBackend(), batch(Mode.EXTEND)
    root_decode.decode_roots(backend)
    backend.init_forward_metadata_out_graph(given)
    assert backend.calls == [(False, Mode.EXTEND, "verify", given.seq_lens)]
    assert backend.forward(1, 2, 3, 4, given) == "plain EXTEND True"


def test_another_backend_keeps_its_own_verification() -> None:
    backend = OtherBackend()
    assert not root_decode.decode_roots(backend)
    assert backend.forward(1, 2, 3, 4, batch(Mode.TARGET_VERIFY)) == "plain TARGET_VERIFY True"


def test_the_host_has_what_is_replaced(running_host: Path) -> None:
    """In its sources: the methods, and that decode reads nothing of a batch but where K and V go."""
    backend = class_def(running_host, TRITON, "TritonAttnBackend")
    found = methods(backend)
    assert {*root_decode.PREPARED, "forward_decode"} <= set(found)
    assert "init_forward_metadata_in_graph" not in found, "it would see a verification"
    taken = parameters(found["forward_decode"])
    assert taken[:6] == ["self", "q", "k", "v", "layer", "forward_batch"]
    read = {
        node.attr for node in ast.walk(found["forward_decode"])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "forward_batch"
    }  # fmt: skip
    assert read == {"out_cache_loc"}, "decode reads more of the batch than a verification of one token has alike"
    base = methods(class_def(running_host, BASE, "AttentionBackend"))
    assert parameters(base["forward"])[:6] == ["self", "q", "k", "v", "layer", "forward_batch"]
