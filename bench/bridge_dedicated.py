"""Rows to a dedicated drafter's GPU and its drafts back, beside the copy of those rows alone.

    python bench/bridge_dedicated.py [--out FILE] [--commit C]     needs two GPUs

`us` is what rank 0's stream takes from before the rows leave until the drafts are in the results, the drafter replying
with drafts that lie ready; `copy_us` what it takes for cudaMemcpyPeerAsync of as many bytes. The stream is held up
first, as by the target's forward, so that both hosts have enqueued their part.
"""

import argparse
import json
import multiprocessing
import secrets
import statistics
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from eaglex import engine as binding
from eaglex.bridge import _follower_tensors
from eaglex.config import DraftConfig, EngineLimits, SpeculationConfig
from eaglex.engine import DraftBatch, DraftResults

ROWS, WIDTH, NODES, LENGTH = 6, 3 * 7168, 5, 100
ROUNDS, WARM = 300, 20
SPECULATION = SpeculationConfig(num_steps=NODES, topk=1, num_draft_tokens=NODES + 1)
LIMITS = EngineLimits(max_batch=8, max_rows=48, num_slots=9)
CONFIG = DraftConfig(
    hidden_size=7168, target_hidden_size=7168, intermediate_size=18432, num_heads=56, num_kv_heads=8, head_dim=128,
    vocab_size=32000, draft_vocab_size=32000, max_positions=4096,
)  # fmt: skip


def terms_of(binary: object) -> object:
    terms = binary.BridgeTerms()
    values = {"num_ranks": 1, "max_lanes": LIMITS.max_batch, "num_draft_tokens": NODES + 1, "num_steps": NODES}
    values |= {"num_slots": LIMITS.num_slots, "vocab_size": CONFIG.vocab_size, "aux_width": WIDTH}
    return binding._fill(terms, **values, max_rows=LIMITS.max_rows)


def drafter(pipe: Connection) -> None:
    """Replies to all requests until rank 0 is gone."""
    binary = binding._extension()
    torch.cuda.set_device(1)
    address, identity, offer = pipe.recv()
    group = binary.BridgeGroup.join(address, terms_of(binary), identity, 1)
    results = DraftResults.allocate(SPECULATION, LIMITS, "cuda:1")
    results.num_nodes.fill_(NODES)
    results.drafted_for.fill_(LENGTH + ROWS)
    results.draft_tokens.copy_(torch.arange(NODES))
    results.parents.copy_(torch.arange(NODES))
    bound = _follower_tensors(binary, results)
    server = binary.RelayServer(group, device=1, offer=offer)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    pipe.send("ready")
    while not pipe.poll():
        if server.next(0.05, results=bound, stream=stream.cuda_stream) is None:
            continue
        server.reply(bound, draft=True, stream=stream.cuda_stream)
        stream.synchronize()
        server.done(draft=True)


def measured(call: object) -> list[float]:
    times = []
    for _ in range(WARM + ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="default: git's")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=drafter, args=(there,))
    process.start()
    binary = binding._extension()
    identity = [secrets.randbits(64), secrets.randbits(64)]
    group = binary.BridgeGroup.create(terms_of(binary), identity)
    client = binary.RelayClient(
        group, config=binding._config(binary, CONFIG, 1.0), speculation=binding._speculation(binary, SPECULATION),
        limits=binding._fill(binary.EngineLimits(), **binding._fields(LIMITS)), deadline=1.0, rejoin_after=0.0,
        device=0,
    )  # fmt: skip
    here.send((group.address, identity, client.offer()))
    assert here.recv() == "ready"
    results = DraftResults.allocate(SPECULATION, LIMITS, "cuda:0")
    bound = _follower_tensors(binary, results)

    def tensor(*values: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device="cuda:0")

    batch = DraftBatch(
        aux_hidden_states=torch.randn(ROWS, WIDTH, device="cuda:0").bfloat16(),
        input_ids=torch.arange(ROWS, device="cuda:0"),
        row_start=tensor(0, ROWS, dtype=torch.int32),
        num_valid=tensor(ROWS, dtype=torch.int32),
        draft_from=torch.tensor([True], device="cuda:0"),
        req_pool_indices=tensor(1, dtype=torch.int64),
        seq_lens=tensor(LENGTH, dtype=torch.int64),
    )
    filled = binding._fill(binary.BatchTensors(), **binding._fields(batch))
    asked = []

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        known = {"slots": [1], "seq_lens": [0 if not asked else LENGTH + ROWS], "new_lens": [LENGTH + ROWS]}
        asked.append(client.draft(filled, bound, **known, stream=stream))

    times = measured(call)
    right = results.num_nodes[1].item() == NODES and results.draft_tokens[1].tolist() == list(range(NODES))
    source = torch.randn(ROWS, WIDTH, device="cuda:0").bfloat16()
    target = torch.empty_like(source, device="cuda:1")
    copies = measured(lambda: target.copy_(source, non_blocking=True))
    here.send("end")
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    row = {
        "transport": "p2p", "placement": "dedicated", "ranks": 1, "bytes": ROWS * WIDTH * 2,
        "us": round(statistics.median(times), 2), "p99_us": round(times[len(times) * 99 // 100], 2),
        "copy_us": round(statistics.median(copies), 2), "asked": sum(asked), "right": right,
        "faults": {name: count for name, count in client.counters().items() if count},
        "commit": arguments.commit or git.stdout.strip(),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(row) + "\n")
    process.join(10)


if __name__ == "__main__":
    main()
