#!/usr/bin/env python3
"""An SGLang server with eaglex behind HTTP: smoke test, then mixed traffic with the host's memory check in every turn.

    socket_check.py install SITE              # once: eaglex's entry point, into a folder on PYTHONPATH
    serve_soak.py PAIR PROMPTS OUT [-- more of the server's flags]     # OUT/soak.json, OUT/server.log

PAIR holds `target/` and `draft/`, PROMPTS is a .npy file of token ids. The server is deterministic, so a greedy prompt
has one answer whatever it is served beside, as long as no request beside it is sampled (then the host lets a coin
decide between equal logits). Each is asked alone first. Then clients ask greedy, long and featured requests, leave in
the middle of an answer, abort, scrape /metrics and ask for health, all at once; for the last third of the time sampled
requests are among them and answers are not compared; then all greedy ones are asked again.

A wrong answer, an error, an answer later than PATIENCE (60) seconds, a server that has died, a failed memory check,
requests left over at the end, and drafts that could not be made: each is a failure, and the exit status is 1.

Environment: SECONDS of traffic (120), less where all of it is to end by END_BY (seconds since the epoch), CLIENTS
(12), SEED (0) of prompts and traffic, PORT (24100), UP (150) seconds to come up in, PATIENCE (60).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from serve_parts.client import Client, Failed
from socket_check import end_in_order
from socket_parts.engine import write

FLAGS = """
    --speculative-algorithm EAGLEX --speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6
    --attention-backend triton --sampling-backend pytorch --grammar-backend none --enable-deterministic-inference
    --context-length 2048 --chunked-prefill-size 256 --max-total-tokens 60000 --max-running-requests 24
    --cuda-graph-max-bs-decode 16 --disable-prefill-cuda-graph --random-seed 1 --enable-metrics
    --mem-fraction-static 0.5 --host 127.0.0.1
"""  # room for all requests: one that is retracted may say something else, under EAGLE3 too
# eaglex's counters that stay at 0, by outcome
NEVER = ("no_room", "not_finite", "bad_index")
FAULTS = ("Traceback (most recent call last)", "Leak Detected", "drafting failed", "CUDA error")


def setting(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


class Server:
    """The process; `alive` and what its log says."""

    def __init__(self, pair: Path, out: Path, port: int, more: list[str]) -> None:
        self.log = out / "server.log"
        # a check in every turn of the scheduler; prompts of a deterministic server are cut at multiples of this
        environment = {
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": "128",
        }  # fmt: skip
        places = ["--model-path", str(pair / "target"), "--speculative-draft-model-path", str(pair / "draft")]
        command = [sys.executable, "-m", "sglang.launch_server", *places, "--port", str(port), *FLAGS.split(), *more]
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def faults(self) -> list[str]:
        """Lines of the log that no server should write."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line[:300] for line in lines if any(fault in line for fault in FAULTS)]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


class Traffic:
    """Prompts with their answers, and clients that ask for them and more. `failures` holds what went wrong."""

    LONG, CONTEXT = 1900, 2048

    def __init__(self, client: Client, text: list[int], patience: float, *, seed: int = 0) -> None:
        self.client, self.text, self.patience, self.seed = client, text, patience, seed
        choose = random.Random(3 + seed)
        lengths = [choose.randint(1, 700) for _ in range(24)]
        self.prompts = [self.cut(choose, length) for length in lengths] + [self.cut(choose, self.LONG)]
        self.new = [choose.randint(1, 120) for _ in self.prompts]
        self.answers: list[list[int]] = []
        self.exact = True  # no request is sampled
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()

    def cut(self, choose: random.Random, length: int) -> list[int]:
        start = choose.randrange(len(self.text) - length)
        return self.text[start : start + length]

    def greedy(self, place: int, **more: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": self.new[place], "ignore_eos": place % 2 == 0}
        return {"input_ids": self.prompts[place], "sampling_params": sampling | more}

    def longest(self, place: int) -> dict[str, Any]:
        room = self.CONTEXT - len(self.prompts[place]) - 8
        return self.greedy(place, max_new_tokens=min(300, room), ignore_eos=True)

    def learn(self) -> None:
        """Every prompt alone, on an idle server."""
        for place in range(len(self.prompts)):
            self.answers.append(self.client.generate(self.greedy(place))["output_ids"])

    def check(self, place: int, got: list[int], how: str) -> None:
        self.counts[how if self.exact else f"{how}, not compared"] += 1
        if not self.exact:
            return
        expected = self.answers[place]
        if got != expected:
            at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
            raise Failed(f"wrong token: prompt {place} {how}, at {at} of {len(expected)} (got {len(got)})")

    def act(self, choose: random.Random, rid: str) -> None:
        place, dice = choose.randrange(len(self.prompts)), choose.random()
        if dice < 0.4:
            self.check(place, self.client.generate(self.greedy(place))["output_ids"], "plain")
        elif dice < 0.6:
            self.check(place, self.client.stream(self.greedy(place)), "streamed")
        elif dice < 0.7 and not self.exact:
            sampled = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
            self.client.generate(self.greedy(place, **sampled))
            self.counts["sampled"] += 1
        elif dice < 0.8:
            featured = choose.choice(({"frequency_penalty": 0.5}, {"stop": [" the", "."]}, {"repetition_penalty": 1.2}))
            self.client.generate(self.greedy(place, **featured))
            self.counts["featured"] += 1
        elif dice < 0.87:
            long = self.longest(place) | {"rid": rid}
            self.client.stream(long, leave_after=choose.randint(1, 40))
            self.counts["left"] += 1
        elif dice < 0.94:
            long = self.longest(place) | {"rid": rid}
            timer = threading.Timer(choose.random() * 0.2, lambda: self.client.post("/abort_request", {"rid": rid}))
            timer.start()
            self.client.post("/generate", long, errors=True)
            timer.join()
            self.counts["aborted"] += 1
        elif dice < 0.97:
            self.client.get("/health_generate")
            self.counts["health"] += 1
        else:
            self.client.metrics()
            self.counts["metrics"] += 1

    def run(self, clients: int, seconds: float, *, exact: bool) -> None:
        """All clients until the time is over or one has failed; a client that does not end is a failure."""
        self.exact, deadline = exact, time.monotonic() + seconds

        def work(number: int) -> None:
            choose = random.Random(100 + self.seed + number)
            turn = 0
            while time.monotonic() < deadline and not self.failures:
                turn += 1
                try:
                    self.act(choose, f"soak-{number}-{turn}")
                except Exception as error:
                    self.failures.append(f"client {number}, turn {turn}: {error!r}"[:400])

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(1.0, deadline + self.patience + 5 - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in threads)
        if stuck:
            self.failures.append(f"{stuck} clients have not ended")


def left_over(client: Client) -> list[str]:
    """What an idle server should not have: requests, which would forbid a flush, and drafts that could not be made.

    Once idle, the host compares its KV pool with what is in the cache, and dies where they differ.
    """
    found, deadline = [], time.monotonic() + 20
    while not client.ok("/flush_cache"):
        if time.monotonic() > deadline:
            return ["the cache cannot be flushed 20 s after the last request"]
        time.sleep(0.5)
    client.generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
    time.sleep(2)
    client.get("/health")
    seen = client.metrics()
    drafted = sum(value for name, value in seen.items() if name.startswith("eaglex:lanes_total") and "drafted" in name)
    if not drafted:
        found.append("eaglex:lanes_total counts no draft")
    for name, value in seen.items():
        if name.startswith("eaglex:lanes_total") and value and any(outcome in name for outcome in NEVER):
            found.append(f"{name} {value}")
    return found


def soak(server: Any, traffic: Traffic, *, clients: int, seconds: float) -> dict[str, Any]:
    """Smoke, traffic, and what is left of it; `failures` is empty where all is well."""
    client, started = traffic.client, time.monotonic()
    report: dict[str, Any] = {}
    try:
        traffic.learn()
        seconds = min(seconds, setting("END_BY", math.inf) - time.time() - 2.5 * (time.monotonic() - started) - 5)
        completion = client.post("/v1/completions", {"model": "x", "prompt": "def ", "max_tokens": 8, "temperature": 0})
        report["completion"] = completion["choices"][0]["text"]
        begun = time.monotonic()
        traffic.run(clients, seconds * 2 / 3, exact=True)
        if not traffic.failures:
            traffic.run(clients, seconds / 3, exact=False)
        report["traffic_s"] = round(time.monotonic() - begun, 1)
        if not traffic.failures:
            traffic.exact = True
            for place in range(len(traffic.prompts)):
                traffic.check(place, client.generate(traffic.greedy(place))["output_ids"], "afterwards")
            traffic.failures += left_over(client)
    except Exception as error:
        traffic.failures.append(repr(error)[:400])
    if not server.alive:
        traffic.failures.append("the server has died")
    traffic.failures += server.faults()
    return report | {
        "seconds": round(time.monotonic() - started, 1),
        "counts": dict(traffic.counts),
        "failures": traffic.failures,
    }


def main() -> int:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    end_in_order()
    pair, prompts, out = (Path(part) for part in sys.argv[1:4])
    out.mkdir(parents=True, exist_ok=True)
    import numpy

    port, patience = int(setting("PORT", 24100)), setting("PATIENCE", 60)
    client = Client(port, patience)
    started = time.monotonic()
    server = Server(pair, out, port, sys.argv[5:])
    try:
        while server.alive and not client.healthy() and time.monotonic() < started + setting("UP", 150):
            time.sleep(0.2)
        up = round(time.monotonic() - started, 1)
        text = numpy.load(prompts).astype(int).tolist()
        traffic = Traffic(client, text, patience, seed=int(setting("SEED", 0)))
        report = soak(server, traffic, clients=int(setting("CLIENTS", 12)), seconds=setting("SECONDS", 120))
    finally:
        server.kill()
    report["up_s"] = up
    write(out / "soak.json", report)
    print(json.dumps(report)[:1500], flush=True)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
