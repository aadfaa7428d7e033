"""Every transport of the bridge through eaglex's own interface, and torch's NCCL broadcast, in one graph replay each.

    torchrun --nproc-per-node 2 bench/bridge_transports.py [--out FILE] [--one-way FILE]

`us` is the time per message of a graph of many, on the slower side, as for torch's broadcast of as many bytes; a push
packs the drafts, a receive checks and unpacks them. Graphs of all ways are replayed in turn, so that what slows the
machine down slows them all. `one_way_us` comes from bench_bridge's rows, `--one-way`.
"""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from eaglex.bridge import Bridge, Members
from eaglex.bridge_transport import GPU_TRANSPORTS
from eaglex.config import EngineLimits, SpeculationConfig
from eaglex.engine import DraftResults
from eaglex.errors import EaglexError

ROUNDS, REPLAYS, WARM = 400, 60, 5
HOW = (
    f"bench/bridge_transports.py: microseconds per message in a graph of {ROUNDS}, on the slower side; median, 99th of "
    f"{REPLAYS} replays. torch_us is torch's NCCL broadcast of as many bytes, measured before eaglex has "
    "a communicator (the lower of graphs of 100 and of as many), torch_in_turn_us in turn with the transports; "
    "one_way_us and push_us: bench_bridge"
)
SHAPES = ((1, 5), (8, 5), (8, 16), (64, 6))  # lanes, nodes: 72, 464, 1168 and 4112 bytes


class Subject:
    """One way to tell the others, ROUNDS times in a graph."""

    def __init__(self, call: Callable[[], None], keep: object = None, rounds: int = ROUNDS) -> None:
        self.keep, self.times, self.rounds = keep, list[float](), rounds
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(rounds):
                call()

    def replay(self) -> None:
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.times.append(begin.elapsed_time(end) * 1e3 / self.rounds)

    def slower_side(self) -> list[float]:
        """Microseconds per message in each replay, in rising order."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.times[WARM:])
        return sorted(max(sides) for sides in zip(*everyone, strict=True))


def torch_subject(size: int, rounds: int) -> Subject:
    message = torch.zeros(size, dtype=torch.uint8, device="cuda")
    return Subject(lambda: dist.broadcast(message, 0), rounds=rounds)


def torch_alone() -> dict[int, float]:
    """The lower median of graphs of 100 and of ROUNDS, by bytes, while the process has no other communicator."""
    found = {}
    for lanes, nodes in SHAPES:
        size = 16 + lanes * (16 + 8 * nodes)
        medians = []
        for rounds in (100, ROUNDS):
            subject = torch_subject(size, rounds)
            for _ in range(WARM + REPLAYS):
                subject.replay()
            medians.append(statistics.median(subject.slower_side()))
        found[size] = min(medians)
    return found


def bridge_subject(members: Members, transport: str, lanes: int, nodes: int) -> Subject:
    device = torch.device("cuda", torch.cuda.current_device())
    speculation = SpeculationConfig(num_steps=nodes, topk=1, num_draft_tokens=nodes + 1)
    limits = EngineLimits(max_batch=lanes, max_rows=lanes * (nodes + 1), num_slots=lanes + 1)
    results = DraftResults.allocate(speculation, limits, device)
    bridge = Bridge(
        members, speculation, limits=limits, vocab_size=1000, results=results, deadline=10.0, transport=transport
    )
    slots = torch.arange(1, lanes + 1, device=device)
    lens = slots + 100
    results.num_nodes.fill_(nodes)
    results.drafted_for[1:] = lens
    results.parents.copy_(torch.arange(nodes, device=device).expand(lanes + 1, nodes))

    def call() -> None:
        if members.rank == 0:
            bridge.push(slots, lens, draft=True)
        else:
            bridge.receive(slots, lens)

    return Subject(call, bridge)


def rows(members: Members) -> list[dict[str, object]]:
    found, alone = [], torch_alone()
    for lanes, nodes in SHAPES:
        size = 16 + lanes * (16 + 8 * nodes)
        subjects, errors = {"torch": torch_subject(size, ROUNDS)}, {}
        for transport in GPU_TRANSPORTS:
            try:
                subjects[transport] = bridge_subject(members, transport, lanes, nodes)
            except EaglexError as error:
                errors[transport] = str(error)
        for _ in range(WARM + REPLAYS):
            for subject in subjects.values():
                subject.replay()
        for transport in GPU_TRANSPORTS:
            row = {"transport": transport, "placement": "rank0", "ranks": dist.get_world_size(), "bytes": size}
            if transport in errors:
                row["error"] = errors[transport]
            else:
                subjects[transport].keep.check()
                times = subjects[transport].slower_side()
                row["us"] = round(statistics.median(times), 2)
                row["p99_us"] = round(times[len(times) * 99 // 100], 2)
            row["torch_us"] = round(alone[size], 2)
            row["torch_in_turn_us"] = round(statistics.median(subjects["torch"].slower_side()), 2)
            if members.rank == 0:
                print(json.dumps(row), flush=True)
            found.append(row)
        members.gather("done", None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one-way", type=Path)
    parser.add_argument("--commit", help="default: git's")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    store = dist.PrefixStore("bench", dist.distributed_c10d._get_default_store())
    found = rows(Members(store, rank=rank, num_ranks=dist.get_world_size(), deadline=60.0))
    if rank == 0 and arguments.out:
        ways = [json.loads(line) for line in arguments.one_way.read_text().splitlines()] if arguments.one_way else []
        for row in found:
            for way in ways:
                if (way["transport"], way["bytes"]) == (row["transport"], row["bytes"]):
                    row |= {name: way[name] for name in ("one_way_us", "one_way_p99_us", "push_us")}
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        commit = arguments.commit or git.stdout.strip()
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "how": HOW}
        lines = ",\n  ".join(json.dumps({**row, "commit": commit}) for row in found)
        arguments.out.write_text(f'{{"about": {json.dumps(about)},\n "rows": [\n  {lines}\n]}}\n')
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
