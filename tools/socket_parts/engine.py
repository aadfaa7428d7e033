"""One engine in a process of its own: it serves a case, or is timed. It says when it is up and starts when told to."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from socket_parts.cases import ADAPTIVE, CASES, CHAIN, COMMON, misshapen, passes_of, updates_of, workload_of

ROUNDS = 2
TURN_SECONDS = 400  # how long an engine that is up waits for its turn
SHAPE = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def write(file: Path, value: Any) -> None:
    """Whole or not at all: the file's presence tells that what it holds is done."""
    part = file.with_suffix(file.suffix + ".part")
    part.write_text(json.dumps(value, indent=1))
    part.rename(file)


def turn(file: Path, number: int = 0) -> bool:
    """Wait until the caller gives the turn `number`; False when it does not."""
    deadline = time.monotonic() + TURN_SECONDS
    while time.monotonic() < deadline:
        if file.with_suffix(f".go{number}").is_file():
            return True
        time.sleep(0.02)
    return False


def engine_of(target: str, draft: str | None, algorithm: str | None, **options: Any) -> Any:
    import sglang

    settings: dict[str, Any] = {
        "model_path": target, "skip_tokenizer_init": True, "attention_backend": "triton", "sampling_backend": "pytorch",
        "grammar_backend": "none", "speculative_algorithm": algorithm, "speculative_draft_model_path": draft,
        "disable_prefill_cuda_graph": True, "log_level": "info",
        "nccl_port": int(os.environ["SOCKET_PORT"]),  # the host's own choice can be another engine's a moment later
    }  # fmt: skip
    return sglang.Engine(**settings | options)


async def serve(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send the requests as they arrive; output ids and counts of each, in the order of the list."""

    async def one(number: int, request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(request["at"])
        sampling = {"temperature": request.get("temperature", 0.0), "max_new_tokens": request["new"]}
        sampling["ignore_eos"] = request["ignore_eos"]
        if "sampling_seed" in request:
            sampling["sampling_seed"] = request["sampling_seed"]
        asked = dict(request.get("features", {}))
        logprobs = asked.pop("logprobs", 0)
        sampling |= asked
        more = {"return_logprob": True, "top_logprobs_num": logprobs} if logprobs else {}
        rid = f"request-{number}"
        if "abort" in request:
            asyncio.get_running_loop().call_later(request["abort"], engine.tokenizer_manager.abort_request, rid)
        try:
            result = await engine.async_generate(input_ids=request["ids"], sampling_params=sampling, rid=rid, **more)
        except Exception as error:
            return {"aborted": True} if "abort" in request else {"error": repr(error)}
        meta = result["meta_info"]
        if "abort" in request:
            return {"aborted": True}
        found = {"logprobs": [row[0] for row in meta["output_token_logprobs"]]} if logprobs else {}
        if asked or logprobs:
            found |= {"feature": ", ".join((*asked, *(["logprobs"] if logprobs else []))), "text": result.get("text")}
            finish = meta.get("finish_reason") or {}
            found["finish"] = finish.get("matched")
            if finish.get("type") == "stop" and misshapen(asked, result.get("text") or ""):
                return {"error": f"not of the shape that was asked for: {result['text']!r}"}
        if "temperature" in request:
            found["sampled"] = True
        return found | {
            "ids": result["output_ids"],
            "verify": meta.get("spec_verify_ct", 0),
            "correct": meta.get("spec_num_correct_drafts", 0),
            "histogram": meta.get("spec_correct_drafts_histogram") or [],  # verifications by correct drafts
            "cached": meta.get("cached_tokens", 0),
            "retracted": meta.get("num_retractions", 0),
        }

    return list(await asyncio.gather(*(one(number, request) for number, request in enumerate(requests))))


def update(engine: Any, target: Path, way: str) -> None:
    """The target's weights anew: its files, then another embedding, which the draft shares, then the first one."""
    from safetensors import safe_open

    name = "model.embed_tokens.weight"
    with safe_open(target / "model.safetensors", "pt") as file:
        embedding = file.get_tensor(name)
    if way == "disk":
        done = engine.update_weights_from_disk(str(target))
    elif way == "tensor":
        done = engine.update_weights_from_tensor([(name, embedding * 0.9)])
    elif way == "ipc":
        done = over_ipc(engine, name, embedding)
    else:
        done = broadcast(engine, name, embedding)
    if not done[0]:
        raise RuntimeError(f"update from {way}: {done[1]}")


def broadcast(engine: Any, name: str, tensor: Any) -> Any:
    """As a trainer's process sends weights, in a process group of its own and the engine's; over TCP, by the CPU."""
    import torch.distributed
    from sglang.srt.utils import init_custom_process_group

    port, group = int(os.environ["SOCKET_PORT"]) + 3, "weights"
    with concurrent.futures.ThreadPoolExecutor(1) as others:
        joined = others.submit(engine.init_weights_update_group, "127.0.0.1", port, 1, 2, group, "gloo")
        mine = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=group
        )
        done = joined.result(60)
        if not done[0]:
            return done
        kind = str(tensor.dtype).removeprefix("torch.")
        taken = others.submit(engine.update_weights_from_distributed, [name], [kind], [list(tensor.shape)], group)
        torch.distributed.broadcast(tensor, src=0, group=mine)
        return taken.result(60)


def over_ipc(engine: Any, name: str, tensor: Any) -> Any:
    """As a parameter server of checkpoint-engine on the same GPU: a handle of its memory, what lies in it, two ends."""
    import torch
    import zmq
    from torch.multiprocessing.reductions import reduce_tensor

    memory = tensor.contiguous().view(-1).view(torch.uint8).cuda()
    torch.cuda.synchronize()
    item = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": 0}
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    address = f"ipc:///tmp/eaglex-weights-{os.getpid()}"
    socket.bind(address)

    def send() -> None:
        for word in (reduce_tensor(memory), [item], None, None):
            socket.send_pyobj(word)
            said = socket.recv()
            if said:
                raise RuntimeError(said.decode())

    with concurrent.futures.ThreadPoolExecutor(1) as others:
        sent = others.submit(send)
        done = engine.update_weights_from_ipc({f"GPU-{torch.cuda.get_device_properties(0).uuid!s}": address})
        sent.result(60)
    return done


def between(engine: Any, name: str, target: Path, number: int) -> None:
    """What a case does before pass `number`, from 1 on."""
    if updates_of(name):
        update(engine, target, updates_of(name)[number - 1])
    if "memory saver" in name:
        engine.release_memory_occupation()
        engine.resume_memory_occupation()


def case(name: str, algorithm: str, pair: Path, prompts: Path, out: Path) -> None:
    """One case under one algorithm: the requests twice, so that the second pass finds the radix cache filled."""
    options = dict(COMMON | CASES[name])
    if algorithm == "none":  # no speculation
        options = {key: value for key, value in options.items() if not key.startswith("speculative_")}
    elif "adaptive" in name:
        config = out.with_suffix(".adaptive")
        write(config, ADAPTIVE)
        options["speculative_adaptive_config"] = str(config)
    speculates = algorithm != "none"
    engine = engine_of(
        str(pair / "target"), str(pair / "draft") if speculates else None, algorithm if speculates else None, **options
    )
    requests = workload_of(name, prompts)[: int(os.environ.get("REQUESTS", "100000"))]
    for request in requests:
        request["new"] = min(request["new"], int(os.environ.get("MOST_NEW", "100000")))
    write(out.with_suffix(".ready"), True)
    if not turn(out):
        return
    passes = []
    for number in range(passes_of(name)):
        if number:
            between(engine, name, pair / "target", number)
        start = time.perf_counter()
        served = engine.loop.run_until_complete(serve(engine, requests))
        passes.append({"seconds": time.perf_counter() - start, "requests": served})
    write(out, {"case": name, "algorithm": algorithm, "passes": passes, "flushed": bool(engine.flush_cache())})


def spread(values: list[float]) -> dict[str, float]:
    """Median, 90th percentile, least, and how many."""
    ordered = sorted(values)
    if not ordered:
        return {"n": 0}
    at = {"median": len(ordered) // 2, "p90": len(ordered) * 9 // 10, "min": 0}
    return {key: round(ordered[place], 3) for key, place in at.items()} | {"n": len(ordered)}


class Timed:
    """An engine with dummy weights, which accept nothing, of the Llama 8B sizes and 8 layers."""

    lengths = (64, 512, 3000)
    batches = (1, 8)

    def __init__(self, algorithm: str, out: Path) -> None:
        self.choose = random.Random(1)
        folders = {}
        for name, fields in {
            "target": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8},
            "draft": {
                "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000,
            },
        }.items():  # fmt: skip
            folders[name] = out.parent / f"{out.stem}-{name}"
            folders[name].mkdir(parents=True, exist_ok=True)
            (folders[name] / "config.json").write_text(json.dumps(SHAPE | fields))
        self.engine = engine_of(
            str(folders["target"]), str(folders["draft"]), algorithm, load_format="dummy", max_total_tokens=60000,
            mem_fraction_static=0.7, context_length=4096, cuda_graph_max_bs_decode=8, disable_radix_cache=True, **CHAIN,
        )  # fmt: skip

    def ids(self, length: int) -> list[int]:
        return [self.choose.randrange(10, 30000) for _ in range(length)]

    def took(self, batch: int, length: int, new: int) -> float:
        """Milliseconds until `batch` requests have ended."""
        ids = [self.ids(length) for _ in range(batch)]
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new}
        start = time.perf_counter()
        self.engine.generate(input_ids=ids, sampling_params=sampling)
        return (time.perf_counter() - start) * 1e3

    async def first_token(self, length: int) -> float:
        """Milliseconds until the first token of a request has arrived; the request ends before this returns."""
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 8}
        ids, first = self.ids(length), 0.0
        start = time.perf_counter()
        async for _ in await self.engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True):
            first = first or (time.perf_counter() - start) * 1e3
        return first

    async def first_tokens(self, length: int, count: int, beside: int = 0) -> list[float]:
        """First tokens of `count` requests, one after the other, while `beside` others decode all the time."""
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 3500}
        names = [f"beside-{length}-{number}-{self.choose.random()}" for number in range(beside)]
        others = [
            asyncio.ensure_future(
                self.engine.async_generate(input_ids=self.ids(64), sampling_params=sampling, rid=name)
            )
            for name in names
        ]
        await asyncio.sleep(0.3 if beside else 0)
        found = [await self.first_token(length) for _ in range(count)]
        for name in names:
            self.engine.tokenizer_manager.abort_request(name)
        await asyncio.gather(*others, return_exceptions=True)
        return found

    def warm(self) -> None:
        for batch in self.batches:
            self.took(batch, 512, 40)
        for length in self.lengths:
            self.took(1, length, 1)
            self.engine.loop.run_until_complete(self.first_tokens(length, 1))

    def round(self) -> dict[str, Any]:
        result: dict[str, Any] = {"cycles_per_second": {}, "request_of_one_token_ms": {}}
        for batch in self.batches:
            took = sorted(self.took(batch, 64, 151) - self.took(batch, 64, 1) for _ in range(3))
            result["cycles_per_second"][batch] = round(150 / took[1] * 1e3, 1)
        run = self.engine.loop.run_until_complete
        for length in self.lengths:
            result["request_of_one_token_ms"][length] = spread([self.took(1, length, 1) for _ in range(15)])
        for name, beside in (("first_token_ms", 0), ("first_token_beside_4_ms", 4)):
            result[name] = {n: spread(run(self.first_tokens(n, 15, beside))) for n in self.lengths}
        return result


def time_one(algorithm: str, out: Path) -> None:
    """Cycles per second, time to first token and the probe's times, once for each turn that is given."""
    timed = Timed(algorithm, out)
    timed.warm()
    probe, seen = Path(os.environ["SOCKET_PROBE"]), 0
    write(out.with_suffix(".ready"), True)
    for number in range(ROUNDS):
        if not turn(out, number):
            return
        result = timed.round()
        rows = json.loads(probe.read_text()) if probe.is_file() else []
        for kind in ("verify", "prefill"):
            for place, name in ((1, "gpu_us"), (2, "host_us")):
                values = [row[place] for row in rows[seen:] if row[0] == kind]
                result[f"{kind}_end_to_copy_{name}"] = spread(values)
        seen = len(rows)
        write(out.with_suffix(f".round{number}"), result)
