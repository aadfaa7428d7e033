#!/usr/bin/env python3
"""Compare EAGLEX with SGLang's own EAGLE3 on a GPU: tokens, accept lengths, and the time to the result copy.

    socket_check.py install SITE               # entry points of eaglex and of the probe, into a folder on PYTHONPATH
    socket_check.py run PAIR PROMPTS OUT       # tokens and times under both algorithms; OUT/socket.json and logs

PAIR holds `target/` and `draft/`; PROMPTS is a .npy file of token ids to cut prompts from. SITE and the folder that
holds eaglex must be on PYTHONPATH. The engines of a wave start and serve beside each other on one GPU. The times come
from two engines with dummy weights of the Llama 8B sizes and 8 layers, measured in turn when no other engine runs.

Environment: CASES, names separated by '; ' (default all); WAVE, engines beside each other; SECONDS_PER_WAVE and
SECONDS_TO_TIME, deadlines; NO_TIMES=1. Exit status 1: something differs or is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ALGORITHMS = ("EAGLE3", "EAGLEX")
CHAIN = {"speculative_num_steps": 5, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6}
TREE = {"speculative_num_steps": 4, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
CASES: dict[str, dict[str, Any]] = {
    "chain": CHAIN,
    "chain, page 64": CHAIN | {"page_size": 64},
    "chain, no overlap": CHAIN | {"disable_overlap_schedule": True},
    "chain, page 64, no overlap": CHAIN | {"disable_overlap_schedule": True, "page_size": 64},
    "tree": TREE,
    "tree, page 64": TREE | {"page_size": 64},
    "tree, no overlap": TREE | {"disable_overlap_schedule": True},
    "tree, page 64, no overlap": TREE | {"disable_overlap_schedule": True, "page_size": 64},
    "chain, 3 slots, page 64": CHAIN | {"max_running_requests": 3, "page_size": 64},
    "tree, 3 slots": TREE | {"max_running_requests": 3},
    "chain, small pool": CHAIN | {"max_total_tokens": 4096, "max_running_requests": 24},
    "tree, small pool": TREE | {"max_total_tokens": 4096, "max_running_requests": 24},
    "tree, small pool, page 64": TREE | {"max_total_tokens": 12288, "max_running_requests": 24, "page_size": 64},
    "chain, forced retraction": CHAIN | {"max_running_requests": 16},
    "tree, forced retraction": TREE | {"max_running_requests": 16},
    "chain, eager": CHAIN | {"disable_cuda_graph": True},
    "chain, sampled": CHAIN,
}
ENVIRONMENT = {
    "chain, forced retraction": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "13"},
    "tree, forced retraction": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "13"},
}
# The host cuts prompts of a deterministic server at multiples of this, 4096 by default: no chunk would ever be cut.
ALIGNED = {"SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": "128"}
MOVED_BY_RETRACTION = ("small pool", "forced retraction")  # where a request starts anew depends on timing
PROBE = '''
import json, os, time
def activate():
    if not os.environ.get("SOCKET_PROBE"):
        return
    import torch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
    pending, rows = [], []
    def mark(result):
        event = torch.cuda.Event(enable_timing=True); event.record()
        result.probe = (event, time.perf_counter())
        return result
    def wrap(owner, name, kind):
        original = getattr(owner, name)
        def wrapped(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            if kind == "verify" or kwargs.get("capture_hidden_mode") is not None:
                result.probe_kind = kind
                mark(result)
            return result
        setattr(owner, name, wrapped)
    wrap(EAGLEWorkerV2, "verify", "verify")
    wrap(TpModelWorker, "forward_batch_generation", "prefill")
    copy = GenerationBatchResult.copy_to_cpu
    def copy_to_cpu(self, *args, **kwargs):
        probe = getattr(self, "probe", None)
        if probe is not None:
            event = torch.cuda.Event(enable_timing=True); event.record()
            pending.append((self.probe_kind, probe[0], event, time.perf_counter() - probe[1]))
        copy(self, *args, **kwargs)
        while len(pending) > 8 and pending[0][2].query():
            kind, end, start, host = pending.pop(0)
            rows.append((kind, end.elapsed_time(start) * 1e3, host * 1e6))
            if len(rows) % 50 == 0:
                with open(os.environ["SOCKET_PROBE"] + ".part", "w") as file:
                    json.dump(rows, file)
                os.replace(file.name, os.environ["SOCKET_PROBE"])
    GenerationBatchResult.copy_to_cpu = copy_to_cpu
'''


def install(site: Path) -> None:
    """Entry points as pip would leave them: the plugin of eaglex, and the probe."""
    for name, target in {"eaglex": "eaglex.hosts.sglang:register", "socket_probe": "socket_probe:activate"}.items():
        info = site / f"{name}-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {target}\n")
        (info / "RECORD").write_text("")
    (site / "socket_probe.py").write_text(PROBE)


def workload(prompts: Path, sampled: bool) -> list[dict[str, Any]]:
    """Requests of mixed length, with shared prefixes and duplicates, in an order of arrival; some are aborted."""
    import numpy

    text = numpy.load(prompts).astype(int).tolist()
    choose = random.Random(7)

    def cut(length: int) -> list[int]:
        start = choose.randrange(len(text) - length)
        return text[start : start + length]

    lengths = [choose.randint(1, 16) for _ in range(16)] + [choose.randint(17, 128) for _ in range(40)]
    lengths += [choose.randint(129, 600) for _ in range(30)] + [choose.randint(601, 1300) for _ in range(6)]
    ids = [cut(length) for length in lengths]
    for length in (63, 200, 384):  # shared prefixes, then exact duplicates
        prefix = cut(length)
        ids += [prefix + cut(choose.randint(1, 90)) for _ in range(8)]
        ids += [prefix] * 3
    ids += [choose.choice(ids) for _ in range(12)]
    choose.shuffle(ids)
    requests = [
        {"ids": prompt, "new": choose.randint(1, 96), "ignore_eos": choose.random() < 0.5, "at": 0.004 * number}
        for number, prompt in enumerate(ids)
    ]
    if sampled:
        for number, request in enumerate(requests):
            request |= {"temperature": 0.8, "sampling_seed": number}
    aborted = [{"ids": cut(100), "new": 400, "ignore_eos": True, "at": 0.05 * n, "abort": 0.15} for n in range(8)]
    return requests + aborted


async def serve(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send the requests as they arrive; output ids and counts of each, in the order of the list."""

    async def one(number: int, request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(request["at"])
        sampling = {"temperature": request.get("temperature", 0.0), "max_new_tokens": request["new"]}
        sampling["ignore_eos"] = request["ignore_eos"]
        if "sampling_seed" in request:
            sampling["sampling_seed"] = request["sampling_seed"]
        rid = f"request-{number}"
        if "abort" in request:
            asyncio.get_running_loop().call_later(request["abort"], engine.tokenizer_manager.abort_request, rid)
        try:
            result = await engine.async_generate(input_ids=request["ids"], sampling_params=sampling, rid=rid)
        except Exception as error:
            if "abort" in request:
                return {"aborted": True}
            return {"error": repr(error)}
        meta = result["meta_info"]
        if "abort" in request:
            return {"aborted": True}
        return {
            "ids": result["output_ids"],
            "verify": meta.get("spec_verify_ct", 0),
            "correct": meta.get("spec_num_correct_drafts", 0),
            "cached": meta.get("cached_tokens", 0),
            "retracted": meta.get("num_retractions", 0),
        }

    return list(await asyncio.gather(*(one(number, request) for number, request in enumerate(requests))))


def engine_of(target: str, draft: str, algorithm: str, **options: Any) -> Any:
    import sglang

    settings: dict[str, Any] = {
        "model_path": target, "skip_tokenizer_init": True, "attention_backend": "triton", "sampling_backend": "pytorch",
        "grammar_backend": "none", "speculative_algorithm": algorithm, "speculative_draft_model_path": draft,
        "disable_prefill_cuda_graph": True, "log_level": "info",
    }  # fmt: skip
    return sglang.Engine(**settings | options)


def case(name: str, algorithm: str, pair: Path, prompts: Path, out: Path) -> None:
    """One case under one algorithm: the workload twice, so that the second finds the radix cache filled."""
    options = {
        "enable_deterministic_inference": True, "context_length": 2048, "chunked_prefill_size": 256,
        "max_total_tokens": 60000, "max_running_requests": 24, "cuda_graph_max_bs_decode": 16,
        "mem_fraction_static": 0.4, "random_seed": 1,
    }  # fmt: skip
    engine = engine_of(str(pair / "target"), str(pair / "draft"), algorithm, **options | CASES[name])
    requests = workload(prompts, "sampled" in name)
    passes = []
    for _ in range(2):
        start = time.perf_counter()
        served = engine.loop.run_until_complete(serve(engine, requests))
        passes.append({"seconds": time.perf_counter() - start, "requests": served})
    flushed = engine.flush_cache()
    write(out, {"case": name, "algorithm": algorithm, "passes": passes, "flushed": bool(flushed)})


def write(out: Path, value: Any) -> None:
    """Whole or not at all: the file's presence tells that the process is done."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1))
    part.rename(out)


def compared(name: str, stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Token for token, and accept counts, over both passes."""
    row: dict[str, Any] = {"case": name, "prompts": 0, "tokens": 0, "different": [], "accept_differs": 0, "errors": 0}
    sums = {"EAGLE3": [0, 0], "EAGLEX": [0, 0]}
    counts = {"retracted": 0, "cached": 0, "aborted": 0}
    for number, (theirs, mine) in enumerate(zip(stock["passes"], ours["passes"], strict=True)):
        for place, (a, b) in enumerate(zip(theirs["requests"], mine["requests"], strict=True)):
            if a.get("aborted") or b.get("aborted"):
                counts["aborted"] += 1
                continue
            if "error" in a or "error" in b:
                row["errors"] += 1
                row.setdefault("first_error", a.get("error") or b.get("error"))
                continue
            row["prompts"] += 1
            row["tokens"] += len(b["ids"])
            if a["ids"] != b["ids"]:
                same = next((i for i, (x, y) in enumerate(zip(a["ids"], b["ids"], strict=False)) if x != y), -1)
                row["different"].append([number, place, same, len(a["ids"])])
            row["accept_differs"] += (a["verify"], a["correct"]) != (b["verify"], b["correct"])
            counts["retracted"] += b["retracted"]
            counts["cached"] += b["cached"]
            for key, value in (("EAGLE3", a), ("EAGLEX", b)):
                sums[key][0] += value["correct"]
                sums[key][1] += value["verify"]
    accept = {key: 1 + correct / max(verify, 1) for key, (correct, verify) in sums.items()}
    row |= counts | {"accept_length": accept, "verifies": {key: value[1] for key, value in sums.items()}}
    row["seconds"] = {x["algorithm"]: [round(p["seconds"], 2) for p in x["passes"]] for x in (stock, ours)}
    must_match = not any(part in name for part in MOVED_BY_RETRACTION)
    row["equal"] = not row["different"] and not row["errors"] and not (must_match and row["accept_differs"])
    return row


def launched(arguments: list[str], result: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with result.with_suffix(".log").open("wb") as file:
        return subprocess.Popen(
            [sys.executable, __file__, *arguments], stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment,
            start_new_session=True,
        )  # fmt: skip


def wait_for(files: list[Path], processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Until every file is there; False when the deadline passes, or when what is missing has no process any more."""
    while time.monotonic() < deadline:
        gone = [process.poll() is not None for process in processes]
        missing = [number for number, file in enumerate(files) if not file.is_file()]
        if not missing:
            return True
        if processes and all(gone[number] for number in missing):
            return False
        time.sleep(0.1)
    return False


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """With their children; an engine of the host can hang while it shuts down."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def compare(pair: Path, prompts: Path, out: Path, names: list[str]) -> list[dict[str, Any]]:
    """The named cases under both algorithms, in waves of engines."""
    wave, seconds = int(os.environ.get("WAVE", "8")), float(os.environ.get("SECONDS_PER_WAVE", "150"))
    jobs = [(name, algorithm) for name in names for algorithm in ALGORITHMS]
    files = {job: out / f"{job[0].replace(', ', '-').replace(' ', '_')}.{job[1]}.json" for job in jobs}
    for first in range(0, len(jobs), wave):
        batch = jobs[first : first + wave]
        processes = []
        for job in batch:
            arguments = ["case", *job, str(pair), str(prompts), str(files[job])]
            processes.append(launched(arguments, files[job], ALIGNED | ENVIRONMENT.get(job[0], {})))
        ended = wait_for([files[job] for job in batch], processes, time.monotonic() + seconds)
        kill(processes)
        late = [job for job in batch if not files[job].is_file()]
        print(f"wave {first // wave}: {'all ended' if ended else late}", flush=True)
    rows = []
    for name in names:
        read = [json.loads(files[name, a].read_text()) if files[name, a].is_file() else None for a in ALGORITHMS]
        rows.append(compared(name, *read) if all(read) else {"case": name, "equal": False, "missing": True})
    for row in rows:
        accept = {key: round(value, 3) for key, value in row.get("accept_length", {}).items()}
        shown = ("prompts", "tokens", "accept_differs", "retracted", "aborted", "seconds")
        fields = {key: row.get(key) for key in shown}
        fields |= {"different": len(row.get("different", [])), "accept": accept, "error": row.get("first_error")}
        print("ok  " if row["equal"] else "FAIL", row["case"].ljust(28), fields, flush=True)
    return rows


def about() -> dict[str, Any]:
    """GPU, driver and versions that a result is from."""
    import importlib.metadata

    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("sglang", "triton")}
    return {
        "gpu": gpu, "torch": torch.__version__, **versions, "python": sys.version.split()[0],
        "commit": os.environ.get("EAGLEX_COMMIT", "unknown"), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


SHAPE = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


ROUNDS = 2


def time_one(algorithm: str, out: Path) -> None:
    """Cycles per second, time to first token, and the probe's times, with dummy weights (nothing is accepted).

    Says that it is ready with `out.ready`, then measures once for each file `out.go0`, `out.go1` that appears, so that
    two engines that are up at once can take turns.
    """
    folders = {}
    for name, fields in {
        "target": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8},
        "draft": {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000},
    }.items():
        folders[name] = out.parent / f"{out.stem}-{name}"
        folders[name].mkdir(parents=True, exist_ok=True)
        (folders[name] / "config.json").write_text(json.dumps(SHAPE | fields))
    engine = engine_of(
        str(folders["target"]), str(folders["draft"]), algorithm, load_format="dummy", max_total_tokens=60000,
        mem_fraction_static=0.4, context_length=4096, cuda_graph_max_bs_decode=8, disable_radix_cache=True, **CHAIN,
    )  # fmt: skip
    choose = random.Random(1)

    def run(batch: int, length: int, new: int) -> float:
        ids = [[choose.randrange(10, 30000) for _ in range(length)] for _ in range(batch)]
        start = time.perf_counter()
        engine.generate(input_ids=ids, sampling_params={"temperature": 0, "ignore_eos": True, "max_new_tokens": new})
        return (time.perf_counter() - start) * 1e3

    batches, lengths, rounds = (1, 8), (64, 512, 3000), []
    for batch in batches:
        run(batch, 512, 40)
    for length in lengths:
        run(1, length, 1)
    write(out.with_suffix(".ready"), True)
    for number in range(ROUNDS):
        if not wait_for([out.with_suffix(f".go{number}")], [], time.monotonic() + 240):
            return
        result: dict[str, Any] = {"cycles_per_second": {}, "ttft_ms": {}}
        for batch in batches:
            took = sorted(run(batch, 64, 151) - run(batch, 64, 1) for _ in range(3))
            result["cycles_per_second"][batch] = round(150 / took[1] * 1e3, 1)
        for length in lengths:
            result["ttft_ms"][length] = spread([run(1, length, 1) for _ in range(21)])
        rounds.append(result)
        probed = json.loads(Path(os.environ["SOCKET_PROBE"]).read_text())
        for kind in ("verify", "prefill"):
            for place, name in ((1, "gpu_us"), (2, "host_us")):
                result[f"{kind}_end_to_copy_{name}"] = spread([row[place] for row in probed if row[0] == kind])
        write(out.with_suffix(f".round{number}"), result)


def spread(values: list[float]) -> dict[str, float]:
    """Median, 90th percentile, least, and how many."""
    ordered = sorted(values)
    if not ordered:
        return {"n": 0}
    at = {"median": len(ordered) // 2, "p90": len(ordered) * 9 // 10, "min": 0}
    return {key: round(ordered[place], 3) for key, place in at.items()} | {"n": len(ordered)}


class Timing:
    """One engine of each algorithm, brought up together and measured in turn."""

    def __init__(self, out: Path) -> None:
        self.files = {algorithm: out / f"time-{algorithm}.json" for algorithm in ALGORITHMS}
        self.processes = [
            launched(["time_one", algorithm, str(file)], file, {"SOCKET_PROBE": str(out / f"probe-{algorithm}.txt")})
            for algorithm, file in self.files.items()
        ]

    def measure(self, seconds: float) -> dict[str, list[Any]]:
        """Rounds of each algorithm; what is not there by the deadline is left out."""
        deadline = time.monotonic() + seconds
        taken: dict[str, list[Any]] = {algorithm: [] for algorithm in ALGORITHMS}
        if wait_for([file.with_suffix(".ready") for file in self.files.values()], self.processes, deadline):
            for number in range(ROUNDS):
                for algorithm, process in zip(ALGORITHMS, self.processes, strict=True):
                    write(self.files[algorithm].with_suffix(f".go{number}"), True)
                    done = self.files[algorithm].with_suffix(f".round{number}")
                    if wait_for([done], [process], deadline):
                        taken[algorithm].append(json.loads(done.read_text()))
                        print(algorithm, number, json.dumps(taken[algorithm][-1]), flush=True)
        kill(self.processes)
        return taken


def run(pair: Path, prompts: Path, out: Path) -> int:
    """Tokens first, with the engines for the times coming up beside; then the times, alone on the GPU."""
    names = os.environ["CASES"].split("; ") if os.environ.get("CASES") else list(CASES)
    timing = None if os.environ.get("NO_TIMES") else Timing(out)
    rows = compare(pair, prompts, out, names)
    report: dict[str, Any] = {"about": about(), "cases": rows}
    write(out / "socket.json", report)
    if timing is not None:
        report["times"] = timing.measure(float(os.environ.get("SECONDS_TO_TIME", "120")))
        write(out / "socket.json", report)
    timed = timing is None or all(len(rounds) == ROUNDS for rounds in report["times"].values())
    return 0 if timed and all(row["equal"] for row in rows) else 1


def main() -> int:
    command, rest = sys.argv[1], sys.argv[2:]
    if command == "install":
        install(Path(rest[0]))
        return 0
    if command == "run":
        return run(*(Path(part) for part in rest))
    if command == "case":
        case(rest[0], rest[1], *(Path(part) for part in rest[2:]))
        os._exit(0)  # the caller kills the engine's processes
    if command == "time_one":
        time_one(rest[0], Path(rest[1]))
        os._exit(0)
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
