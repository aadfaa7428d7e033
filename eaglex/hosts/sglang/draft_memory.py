"""What a draft costs in GPU memory, and how the host is told of it before it sizes its KV pool.

Weights are loaded by then, so the host finds them gone from the free memory. K and V of the prefix are charged per
token: the host's own estimate (draft layers in units of the target's) is replaced by the true bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from eaglex.config import DraftConfig
from eaglex.errors import ConfigError
from eaglex.hosts.sglang import compat, process_memory
from eaglex.weights import DraftWeights


@dataclass
class Ledger:
    """Bytes of GPU memory by purpose: planned from shapes, and used, by what this process had before and after.

    Where the driver does not tell that, by what was free: another process that takes memory of the same GPU meanwhile
    is counted then. Without a GPU nothing is.
    """

    device: torch.device
    planned: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def taking(self, purpose: str) -> Iterator[None]:
        """Count what the block takes, and what it gives back, under `purpose`."""
        own_before, all_before = self._taken()
        yield
        own, taken = self._taken()
        used = taken - all_before if own is None or own_before is None else own - own_before
        self.used[purpose] = self.used.get(purpose, 0) + used

    def _taken(self) -> tuple[int | None, int]:
        """What this process has, where that is known, and what all of them have."""
        if self.device.type != "cuda":
            return None, 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # what is cached and free is neither used by the draft nor lost to the host
        free, total = torch.cuda.mem_get_info(self.device)
        return process_memory.used_here(self.device), total - free

    def __str__(self) -> str:
        parts = [f"{name} {size / 1e9:.3f}" for name, size in self.planned.items()]
        found = [f"{name} {size / 1e9:.3f}" for name, size in self.used.items()]
        return (
            f"planned {sum(self.planned.values()) / 1e9:.3f} GB ({', '.join(parts)}), used "
            f"{sum(self.used.values()) / 1e9:.3f} GB ({', '.join(found)})"
        )


def kv_bytes_per_token(config: DraftConfig, dtype: torch.dtype) -> int:
    """K and V of one token in all of the draft's layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def own_weight_bytes(weights: DraftWeights, shared: tuple[str, ...]) -> int:
    """Bytes of the draft's tensors, without those that are the target's own memory; of tied ones once."""
    own = {id(tensor): tensor.nbytes for name, tensor in weights.named() if name not in shared}
    return sum(own.values())


def charge_kv(model_runner: Any, bytes_per_token: int) -> None:
    """Let the host's KV sizing of this target count `bytes_per_token` more for each token.

    Called between the target's load and the sizing. The host's share for a draft is taken out, so that nothing is
    counted twice.

    Raises:
        ConfigError: the host sizes this target's pool in another way (sliding windows, recurrent state).
    """
    if model_runner.is_hybrid_swa:
        raise ConfigError("EAGLEX does not serve a target with sliding-window KV pools: the draft's K and V have none.")
    if compat.symbol("mambaish_config")(model_runner.model_config) is not None:
        raise ConfigError(
            "EAGLEX does not serve a hybrid target (Mamba, linear attention): it sizes its pools by state."
        )
    model_runner.spec_aux_config.eagle_draft_num_layers = None
    sizing = compat.symbol("DefaultPoolConfigurator")
    plain = getattr(sizing._compute_cell_size, "__wrapped__", sizing._compute_cell_size)

    @functools.wraps(plain)
    def compute(self: Any, kvc: Any, num_layers: int) -> int:
        size = int(plain(self, kvc, num_layers))
        return size if kvc.is_draft_worker else size + bytes_per_token

    sizing._compute_cell_size = compute
