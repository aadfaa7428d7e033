"""The main job on a GPU: `eaglex generate` with the repository's pair, lossless in every type and form of draft."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")
from hf_pair import target_model

from eaglex.hosts import plain
from eaglex.hosts.hf_target import HookedTarget

pytestmark = pytest.mark.gpu


def generate(*options: str, **environment: str) -> dict[str, object]:
    command = [sys.executable, "-m", "eaglex", "generate", "--check", "--json", "--max-new-tokens", "64", *options]
    done = subprocess.run(command, env=os.environ | environment, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.timeout(150)
@pytest.mark.parametrize("options", [(), ("--topk", "4", "--num-draft-tokens", "16")], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_pair_speculates_without_loss(dtype: str, options: tuple[str, ...]) -> None:
    run = generate("--dtype", dtype, *options)
    assert run["lossless"] is True
    assert run["accept_length"] > 2.5


@pytest.mark.timeout(150)
def test_auto_measures_on_the_gpu() -> None:
    """The text is the target's own whatever it chooses."""
    run = generate("--dtype", "float32", "--draft-quant", "auto")
    assert run["lossless"] is True
    assert run["accept_length"] > 2.5


def test_the_targets_attention_plans_nothing_per_length() -> None:
    """cuDNN's is left out of the target's forwards, drafted and plain alike, and given back behind them."""
    allowed = []
    target = HookedTarget(target_model().cuda().bfloat16(), (0, 1, 2))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    target.model.register_forward_hook(lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled()))
    tokens = torch.tensor([1, 2, 3], device="cuda")
    with torch.inference_mode():
        target.extend(target.new_cache(), tokens)
    plain.generate(target, [1, 2, 3], count=2)
    assert len(allowed) >= 3
    assert not any(allowed)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
