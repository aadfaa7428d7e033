"""A prompt of T tokens through the engine, and through a full layer by torch (cuBLAS and SDPA), in one run.

    python bench/prompt.py [--tokens 4096] [--out FILE]

The engine needs fc and the K and V projections for all tokens, and everything else for the last one alone (the
single-layer identity). torch does what a server does: fc, the whole layer over all tokens, head and top-1 for the last.
H4096 / I14336 / 32 heads, 8 kv heads / V32k, bf16; the engine drafts its first token too (K = 1).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_ops import captured, time_us

from eaglex.config import DraftConfig, EngineLimits, SpeculationConfig
from eaglex.engine import DraftBatch, DraftEngine
from eaglex.weights import DraftWeights, LayerWeights, expected_shapes

CONFIG = DraftConfig(hidden_size=4096, target_hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8,
                     head_dim=128, vocab_size=32000, draft_vocab_size=32000, max_positions=16384)


def random_weights() -> DraftWeights:
    def tensor(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device="cuda", dtype=torch.bfloat16)
        return (torch.randn(shape, device="cuda") * shape[1]**-0.5).bfloat16()

    tensors = {name: tensor(tuple(shape)) for name, shape in expected_shapes(CONFIG).items() if name != "d2t"}
    layer = LayerWeights(**{name[9:]: t for name, t in tensors.items() if name.startswith("layers.0.")})
    return DraftWeights(embed_tokens=tensors["embed_tokens"], fc=tensors["fc"], aux_norms=[], layers=[layer],
                        norm=tensors["norm"], lm_head=tensors["lm_head"])


def engine_cycle(weights: DraftWeights, tokens: int) -> Callable[[], None]:
    table = torch.arange(2 * 16384, dtype=torch.int32, device="cuda").view(2, -1)
    k, v = (torch.zeros(2 * 16384, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    engine = DraftEngine(CONFIG, SpeculationConfig(num_steps=1),
                         limits=EngineLimits(max_batch=1, max_rows=tokens, num_slots=2), weights=weights,
                         req_to_token=table, draft_k=[k], draft_v=[v])
    engine.warm_up()

    def ints(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cuda")

    batch = DraftBatch(
        aux_hidden_states=torch.randn(tokens, CONFIG.aux_width, device="cuda").bfloat16(),
        input_ids=torch.randint(0, CONFIG.vocab_size, (tokens,), device="cuda"),
        row_start=ints([0, tokens], torch.int32), num_valid=ints([tokens], torch.int32),
        draft_from=torch.tensor([True], device="cuda"), req_pool_indices=ints([1]), seq_lens=ints([0]))

    def run() -> None:
        engine.run(batch, torch.cuda.current_stream().cuda_stream)

    run()
    assert engine.counters()["drafted"] == 1
    return run


def torch_layer(w: DraftWeights, tokens: int) -> Callable[[], Tensor]:
    layer = w.layers[0]
    qkv = torch.cat([layer.q_proj, layer.k_proj, layer.v_proj])
    gate_up = torch.cat([layer.gate_proj, layer.up_proj])
    aux = torch.randn(tokens, CONFIG.aux_width, device="cuda").bfloat16()
    ids = torch.randint(0, CONFIG.vocab_size, (tokens,), device="cuda")
    angle = torch.outer(torch.arange(tokens, device="cuda"), 1e4 ** (-torch.arange(64, device="cuda") / 64.0))
    cos, sin = (torch.cat([t, t], -1).bfloat16() for t in (angle.cos(), angle.sin()))

    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, (CONFIG.hidden_size,), w.norm, 1e-5)

    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    def run() -> Tensor:
        hidden = F.linear(aux, w.fc)
        x = torch.cat([norm(F.embedding(ids, w.embed_tokens)), norm(hidden)], -1)
        q, k, v = (t.unflatten(-1, (-1, 128)).transpose(0, 1)[None] for t in
                   F.linear(x, qkv).split([4096, 1024, 1024], -1))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        y = hidden + F.linear(y[0].transpose(0, 1).flatten(1), layer.o_proj)
        gate, up = F.linear(norm(y), gate_up).chunk(2, -1)
        y = y + F.linear(F.silu(gate) * up, layer.down_proj)
        return F.linear(norm(y[-1:]), w.lm_head).float().log_softmax(-1).max(-1).indices

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    weights, tokens = random_weights(), arguments.tokens
    with torch.inference_mode():
        # Both as graphs, so that neither pays for its launches on the host.
        work = engine_cycle(weights, tokens), torch_layer(weights, tokens)  # held: a graph does not own what it reads
        ours, layer = (time_us([captured(each)], arguments.repeats) for each in work)
    row = {"tokens": tokens, "engine_us": round(ours, 1), "torch_layer_us": round(layer, 1),
           "ratio": round(ours / layer, 3)}
    print(json.dumps(row))
    if arguments.out:
        arguments.out.write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
