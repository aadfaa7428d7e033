"""One engine in a process of its own, on dummy weights of the Llama-3.1-8B shape: it is timed when told to."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from socket_parts.engine import engine_of, turn, write

SHAPE = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
DRAFT_VOCAB = 32000
PROMPT, NEW = 512, 300
LENGTHS = (64, PROMPT, 3000)
FIRST, PROBE = "first tokens", "probe"  # turns that are not a batch
STOCK_DRAFTS = ("eagle3", "eagle3-fp8", "none", "socket")


def setting(name: str, default: str) -> str:
    return os.environ.get(name, default)


def batches() -> list[int]:
    return [int(part) for part in setting("BATCHES", "1,4,16,64").split(",")]


def speculation() -> dict[str, int]:
    """Of the host's names: K steps, k branches; a chain has K + 1 draft tokens, a tree NODES."""
    steps, topk = int(setting("K", "5")), int(setting("TOPK", "1"))
    nodes = steps + 1 if topk == 1 else int(setting("NODES", "16"))
    return {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }


def write_configs(folder: Path, shape: dict[str, Any]) -> tuple[Path, Path]:
    target, draft = folder / "target", folder / "draft"
    for place, fields in {
        target: {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": int(setting("LAYERS", "8"))},
        draft: {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB},
    }.items():
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(shape | fields))
    return target, draft


class Timed:
    """An engine that is up. `startup` is the seconds that it took."""

    def __init__(self, name: str, out: Path) -> None:
        from serve_parts.weights import write_weights

        self.choose = random.Random(1)
        target, draft = write_configs(out.parent / f"{out.stem}-files", SHAPE)
        if name not in STOCK_DRAFTS:  # eaglex reads a draft's files; the host makes dummy weights itself
            write_weights(target, draft, SHAPE, DRAFT_VOCAB)
        options: dict[str, Any] = {
            "load_format": "dummy", "max_total_tokens": int(setting("POOL", "72000")),
            "max_running_requests": max(batches()), "mem_fraction_static": float(setting("FRACTION", "0.7")),
            "context_length": 4096, "cuda_graph_max_bs_decode": max(batches()),
            "disable_radix_cache": True, "tp_size": int(setting("TP", "1")), **speculation(),
        }  # fmt: skip
        if setting("NCCL_ONLY", ""):
            options["disable_custom_all_reduce"] = True
        if name == "eagle3-fp8":
            options["speculative_draft_model_quantization"] = "fp8"
        algorithm: str | None = {"none": None, "eagle3": "EAGLE3", "eagle3-fp8": "EAGLE3"}.get(name, "EAGLEX")
        if algorithm is None:
            for key in speculation():
                del options[key]
        started = time.perf_counter()
        self.engine = engine_of(str(target), str(draft) if algorithm else None, algorithm, **options)
        self.startup = time.perf_counter() - started

    def ids(self, length: int) -> list[int]:
        return [self.choose.randrange(10, 30000) for _ in range(length)]

    def took(self, batch: int, new: int) -> tuple[float, dict[str, Any]]:
        """Seconds until `batch` requests have ended, and the first one's meta_info."""
        ids = [self.ids(PROMPT) for _ in range(batch)]
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new}
        start = time.perf_counter()
        result = self.engine.generate(input_ids=ids, sampling_params=sampling)
        return time.perf_counter() - start, result[0]["meta_info"]

    async def first_token(self, length: int, new: int = 4) -> float:
        """Seconds until the first token of a prompt on an idle server; of all there are with `new` = 1."""
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new}
        ids, first = self.ids(length), 0.0
        start = time.perf_counter()
        async for _ in await self.engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True):
            first = first or time.perf_counter() - start
        return first

    def warm(self) -> None:
        for batch in batches():
            self.took(batch, 24)
        for length in LENGTHS:
            self.engine.loop.run_until_complete(self.first_token(length))

    def batch(self, size: int, new: int = NEW) -> dict[str, Any]:
        """`size` requests of `new` tokens, less as many of 2."""
        short, _ = self.took(size, 2)
        seconds, meta = self.took(size, new)
        tokens = new - 2
        accept = meta.get("spec_accept_length") or 1.0
        return {
            "tok_s": round(size * tokens / (seconds - short), 1),
            "cycle_us": round((seconds - short) / tokens * accept * 1e6, 1),
            "accept_length": round(accept, 3),
        }

    def first_tokens(self) -> dict[str, Any]:
        """One prompt of each length: until its first token, and until it ends where that is all."""
        run = self.engine.loop.run_until_complete
        run(self.first_token(LENGTHS[0]))  # behind a stop of the process

        def each(new: int) -> dict[int, float]:
            return {length: round(run(self.first_token(length, new)) * 1e3, 2) for length in LENGTHS}

        return {"first_token_ms": each(4), "one_token_ms": each(1)}

    def probed(self, probe: Path) -> dict[str, Any]:
        if "SERVE_PROBE" not in os.environ:
            return {}
        probe.unlink(missing_ok=True)
        Path(f"{probe}.want").write_text("")
        self.took(1, 1)
        deadline = time.monotonic() + 5
        while not probe.is_file() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not probe.is_file():
            return {}
        found = json.loads(probe.read_text())
        stages: dict[str, dict[int, dict[str, float]]] = {}
        for stage in ("draft", "extend", "verify", "host", "before", "after", "verify_cpu", "late"):
            for batch in batches():
                values = [us for kind, count, us in found["rows"] if kind == stage and count == batch]
                if values:
                    median = statistics.median(values)
                    stages.setdefault(stage, {})[batch] = {"median": round(median, 1), "n": len(values)}
        kept = {key: found[key] for key in ("reserved_bytes", "paused_cycles")}
        return {"stages": stages, "gpu_bytes": used_by(found["pid"]), **kept}


def used_by(pid: int) -> int | None:
    """GPU memory of a process in bytes, where the driver tells it."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    pairs = [line.split(",") for line in lines if "," in line]
    found = [int(mib) << 20 for one, mib in pairs if one.strip() == str(pid) and mib.strip().isdigit()]
    return found[0] if found else None


def one(name: str, out: Path) -> None:
    """Up, warm, then what each turn asks for: a batch of so many requests, first tokens, or what the probe has seen."""
    timed = Timed(name, out)
    timed.warm()
    write(out.with_suffix(".ready"), {"startup_s": round(timed.startup, 1)})
    number = 0
    while turn(out, number):
        asked = json.loads(out.with_suffix(f".go{number}").read_text())
        if asked == FIRST:
            done = timed.first_tokens()
        elif asked == PROBE:
            done = timed.probed(Path(setting("SERVE_PROBE", "")))
        else:
            done = timed.batch(asked, int(setting("NEW", str(NEW))))
        write(out.with_suffix(f".round{number}"), done)
        number += 1
