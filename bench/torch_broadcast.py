"""torch's NCCL broadcast in one graph replay, to compare with bench/bridge.cu: `torchrun --nproc-per-node 2 FILE`."""

import json
import os
import statistics

import torch
import torch.distributed as dist

ROUNDS, REPLAYS = 100, 20


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for size in (64, 72, 464, 1168, 4112):
        message = torch.zeros(size, dtype=torch.uint8, device="cuda")
        for _ in range(3):
            dist.broadcast(message, 0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(ROUNDS):
                dist.broadcast(message, 0)
        times = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / ROUNDS)
        if rank == 0:
            found = {"torch": torch.__version__, "bytes": size, "torch_us": round(statistics.median(times), 2)}
            print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
