"""The work of bench/cycle.cu by torch ops in a CUDA graph, and the rows of bench/results/cycle-h200.json.

    build/bench/bench_cycle --json rows.jsonl --commit $(git rev-parse --short HEAD)
    python bench/torch_ops.py rows.jsonl --out bench/results/cycle-h200.json

For each row the same shapes: fc over all rows of the extend, K and V for all of them, everything else for one row per
request (the single-layer identity, which favours torch over what servers do), then K - 1 steps, log-softmax, top-k,
re-ranking. K and V lie contiguously, so nothing is gathered through pages. Two sets of weights take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACCEPTED = 3  # rows of a request that count, as in bench/cycle.cu
SETS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of bench_cycle: what is drafted, and the draft's shape."""

    batch: int
    num_steps: int
    topk: int
    num_draft_tokens: int
    context: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocab: int


class Draft:
    """A random one-layer draft in bf16, and static buffers for one batch."""

    def __init__(self, case: Case) -> None:
        c = self.case = case
        self.valid = min(c.num_draft_tokens, ACCEPTED)
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

        def matrix(out: int, width: int) -> Tensor:
            return (torch.randn(out, width, device="cuda") * width**-0.5).bfloat16()

        self.fc, self.o = matrix(c.hidden, 3 * c.hidden), matrix(c.hidden, q)
        self.qkv = matrix(q + 2 * kv, 2 * c.hidden)
        self.gate_up, self.down = matrix(2 * c.intermediate, c.hidden), matrix(c.hidden, c.intermediate)
        self.head, self.embed = matrix(c.draft_vocab, c.hidden), matrix(c.draft_vocab, c.hidden)
        self.gamma = torch.ones(c.hidden, device="cuda", dtype=torch.bfloat16)
        self.d2t = torch.zeros(c.draft_vocab, dtype=torch.int64, device="cuda")
        length = c.context + c.num_draft_tokens + c.num_steps * c.topk
        self.k, self.v = (torch.randn(c.batch, c.kv_heads, length, c.head_dim, device="cuda").bfloat16()
                          for _ in range(2))
        angle = torch.outer(torch.arange(length, device="cuda"),
                            5e5 ** (-torch.arange(c.head_dim // 2, device="cuda") * 2.0 / c.head_dim))
        self.cos, self.sin = (torch.cat([t, t], -1).bfloat16() for t in (angle.cos(), angle.sin()))
        self.aux = torch.randn(c.batch * c.num_draft_tokens, 3 * c.hidden, device="cuda").bfloat16()
        self.ids = torch.randint(0, c.draft_vocab, (c.batch, c.num_draft_tokens), device="cuda")

    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.gamma, 1e-5)

    def rotate(self, x: Tensor, first: int) -> Tensor:
        """x [B, heads, T, D] at positions first.. (T rows in a row) or all at `first` (a frontier)."""
        at = slice(first, first + x.shape[2]) if self.in_a_row else slice(first, first + 1)
        low, high = x.chunk(2, -1)
        return x * self.cos[at] + torch.cat([-high, low], -1) * self.sin[at]

    def heads_of(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.case.head_dim)).transpose(1, 2)

    def layer(self, x: Tensor, residual: Tensor, *, at: int, width: int, mask: Tensor | None, store: bool) -> Tensor:
        """x [B, T, 2H] at position `at`: its queries over the first `width` keys; K and V are stored behind them."""
        c = self.case
        q_size, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        if store:
            q, k, v = F.linear(x, self.qkv).split([q_size, kv, kv], -1)
            k, v = self.rotate(self.heads_of(k), at), self.heads_of(v)
            self.k[:, :, width - x.shape[1]: width], self.v[:, :, width - x.shape[1]: width] = k, v
        else:
            q = F.linear(x, self.qkv[:q_size])
        attended = F.scaled_dot_product_attention(
            self.rotate(self.heads_of(q), at), self.k[:, :, :width], self.v[:, :, :width], attn_mask=mask,
            enable_gqa=True)
        y = residual + F.linear(attended.transpose(1, 2).flatten(2), self.o)
        gate, up = F.linear(self.norm(y), self.gate_up).chunk(2, -1)
        return y + F.linear(F.silu(gate) * up, self.down)

    def top(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(self.norm(hidden), self.head).float().log_softmax(-1).topk(self.case.topk, -1)

    def extend(self) -> tuple[Tensor, Tensor, Tensor]:
        """fc, K and V of all rows; the layer and head for the last valid row: hidden [B, 1, H], scores, ids."""
        c, n = self.case, self.case.num_draft_tokens
        fused = F.linear(self.aux, self.fc).view(c.batch, n, c.hidden)
        x = torch.cat([self.norm(F.embedding(self.ids, self.embed)), self.norm(fused)], -1)
        self.in_a_row = True
        kv = c.kv_heads * c.head_dim
        k, v = F.linear(x, self.qkv[c.heads * c.head_dim:]).split([kv, kv], -1)
        span = slice(c.context, c.context + n)
        self.k[:, :, span], self.v[:, :, span] = self.rotate(self.heads_of(k), c.context), self.heads_of(v)
        last = slice(self.valid - 1, self.valid)
        self.in_a_row = False
        length = c.context + self.valid
        hidden = self.layer(x[:, last], fused[:, last], at=length - 1, width=length, mask=None, store=False)
        return hidden, *self.top(hidden)

    def step(self, step: int, hidden: Tensor, tokens: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """One step over the frontier: hidden [B, k, H], tokens [B, k]."""
        c = self.case
        width = c.context + self.valid + step * c.topk
        x = torch.cat([self.norm(F.embedding(tokens, self.embed)), self.norm(hidden)], -1)
        out = self.layer(x, hidden, at=c.context + self.valid + step - 1, width=width, mask=seen, store=True)
        return out, *self.top(out)

    def cycle(self) -> Tensor:
        c, k = self.case, self.case.topk
        hidden, score, ids = self.extend()
        grid_scores, grid_tokens = [score.flatten(1)], [(ids + self.d2t[ids]).flatten(1)]
        best = torch.arange(k, device="cuda").expand(c.batch, k)
        frontier = score.flatten(1)
        seen: Tensor | None = None
        for step in range(1, c.num_steps):
            tokens = grid_tokens[-1].gather(1, best)
            parent = best // k
            hidden = hidden.expand(-1, k, -1) if step == 1 else hidden.gather(
                1, parent[..., None].expand(-1, -1, c.hidden))
            if k > 1:
                mine = torch.eye(k, dtype=torch.bool, device="cuda").expand(c.batch, 1, k, k)
                if seen is None:
                    seen = torch.ones(c.batch, 1, k, c.context + self.valid, dtype=torch.bool, device="cuda")
                else:
                    seen = seen.gather(2, parent[:, None, :, None].expand(-1, -1, -1, seen.shape[-1]))
                seen = torch.cat([seen, mine], -1)
            hidden, top, ids = self.step(step, hidden, tokens, seen)
            score = frontier[..., None] + top
            grid_scores.append(score.flatten(1))
            grid_tokens.append((ids + self.d2t[ids]).flatten(1))
            frontier, best = score.flatten(1).topk(k, -1)
        kept = torch.cat(grid_scores, 1).topk(c.num_draft_tokens - 1, -1).indices.sort(-1).values
        return torch.cat(grid_tokens, 1).gather(1, kept)


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`work` as a graph, warmed up."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def time_us(graphs: list[torch.cuda.CUDAGraph], repeats: int) -> float:
    """Median of all graphs one after another, behind a busy device, divided by their number as in bench/cycle.cu."""
    times = []
    for i in range(-3, repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(300_000)
        begin.record()
        for graph in graphs:
            graph.replay()
        end.record()
        end.synchronize()
        if i >= 0:
            times.append(begin.elapsed_time(end) * 1e3 / len(graphs))
    return statistics.median(times)


def measure(row: dict[str, Any], repeats: int) -> dict[str, float]:
    """torch's µs for the cycle, the extend and one step of that row."""
    case = Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)})
    drafts = [Draft(case) for _ in range(SETS)]

    def step_of(draft: Draft) -> Callable[[], Any]:
        draft.in_a_row = False
        hidden = torch.randn(case.batch, case.topk, case.hidden, device="cuda").bfloat16()
        tokens = torch.zeros(case.batch, case.topk, dtype=torch.int64, device="cuda")
        width = case.context + draft.valid + case.topk
        seen = None if case.topk == 1 else torch.ones(case.batch, 1, case.topk, width, dtype=torch.bool, device="cuda")
        return lambda: draft.step(1, hidden, tokens, seen)

    work = {"torch_us": [d.cycle for d in drafts], "torch_extend_us": [d.extend for d in drafts],
            "torch_step_us": [step_of(d) for d in drafts]}
    with torch.inference_mode():
        return {name: round(time_us([captured(w) for w in each], repeats), 1) for name, each in work.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="what bench_cycle --json wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    for row in rows:
        row |= {"stock_us": None} | measure(row, arguments.repeats)
        torch.cuda.empty_cache()
        print(f"{row['shape']:>14} batch {row['batch']:2d} topk {row['topk']}: cycle {row['cycle_us']:8.1f} us, "
              f"torch {row['torch_us']:8.1f} ({row['torch_us'] / row['cycle_us']:.2f} x); step {row['step_us']:6.1f}, "
              f"torch {row['torch_step_us']:6.1f}; extend {row['extend_us']:6.1f}, torch {row['torch_extend_us']:6.1f}",
              flush=True)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
             "how": "bench/cycle.cu and bench/torch_ops.py in one run; microseconds are medians"}
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    arguments.out.write_text(f'{{"about": {json.dumps(about)},\n "rows": [\n  {lines}\n ]}}\n')


if __name__ == "__main__":
    main()
