"""What is compared: the cases, the requests that each serves, and how two results are held against each other."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

from socket_parts.paired import differences

ALGORITHMS = ("EAGLE3", "EAGLEX")
CHAIN = {"speculative_num_steps": 5, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6}
TREE = {"speculative_num_steps": 4, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
NO_OVERLAP = {"disable_overlap_schedule": True}
EAGER = {"disable_cuda_graph": True}
CASES: dict[str, dict[str, Any]] = {
    "chain": CHAIN,
    "chain, no overlap": CHAIN | NO_OVERLAP,
    "tree, page 64": TREE | {"page_size": 64},
    "chain, forced retraction": CHAIN | {"max_running_requests": 16},
    "chain, two GPUs": CHAIN | {"tp_size": 2},
    "tree, two GPUs": TREE | {"tp_size": 2},
    "chain, 3 slots, page 64": CHAIN | {"max_running_requests": 3, "page_size": 64},
    "tree, 3 slots": TREE | {"max_running_requests": 3},
    "chain, page 64": CHAIN | {"page_size": 64},
    "chain, page 64, no overlap": CHAIN | NO_OVERLAP | {"page_size": 64},
    "tree": TREE,
    "tree, no overlap": TREE | NO_OVERLAP,
    "tree, page 64, no overlap": TREE | NO_OVERLAP | {"page_size": 64},
    "tree, forced retraction": TREE | {"max_running_requests": 16},
    "chain, small pool": CHAIN | {"max_total_tokens": 2560},
    "tree, small pool": TREE | {"max_total_tokens": 4096},
    "tree, small pool, page 64": TREE | {"max_total_tokens": 12288, "page_size": 64},
    "chain, eager": CHAIN | EAGER,
    "tree, eager": TREE | EAGER,
    "chain, page 16": CHAIN | {"page_size": 16},
    "tree, page 16": TREE | {"page_size": 16},
    "chain, features": CHAIN | {"skip_tokenizer_init": False},
    "tree, features": TREE | {"skip_tokenizer_init": False},
    "chain, weight updates": CHAIN,
    "chain, weight updates, two GPUs": CHAIN | {"tp_size": 2},
    "chain, weight updates by IPC": CHAIN,
    "chain, sampled": CHAIN,
    "tree, sampled": TREE,
    "chain, features, no overlap": CHAIN | NO_OVERLAP | {"skip_tokenizer_init": False},
    "chain, mixed sampling": CHAIN,
    "chain, many prompts": CHAIN,
    "chain, acceptance": CHAIN
    | {"max_running_requests": 64, "cuda_graph_max_bs_decode": 64, "chunked_prefill_size": 1024},
    "chain, no radix cache": CHAIN | {"disable_radix_cache": True},
    "chain, adaptive": CHAIN | {"speculative_adaptive": True},
    "chain, structured": CHAIN | {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"},
    "tree, structured": TREE | {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"},
    "chain, memory saver": CHAIN | {"enable_memory_saver": True, "enable_weights_cpu_backup": True},
}
# Steps by batch: from 6 or so requests on a root alone is verified, below that all steps, some or none.
ADAPTIVE = {"1": {"candidate_steps": [5]}, "4": {"candidate_steps": [0, 1, 5]}, "8": {"candidate_steps": [0]}}
COMMON: dict[str, Any] = {
    "enable_deterministic_inference": True, "context_length": 2048, "chunked_prefill_size": 256,
    "max_total_tokens": 60000, "max_running_requests": 24, "cuda_graph_max_bs_decode": 16,
    "mem_fraction_static": 0.9, "random_seed": 1, "sleep_on_idle": True,  # dozens of them wait for their turn
}  # fmt: skip
# Ways in which weights change, one pass after each: the same again, another embedding, and the first one again.
UPDATES = ("disk", "tensor", "distributed")
IPC_UPDATES = ("tensor", "ipc")  # the host takes weights by IPC with checkpoint-engine's worker, a package of its own
# the slow ones serve the requests once
ONE_PASS = (
    "3 slots", "small pool", "forced retraction", "eager", "two GPUs", "many prompts", "adaptive", "acceptance",
    "no radix cache",
)  # fmt: skip
# Where a request starts anew depends on timing, and what it then says can depend on where: the host computes K and V of
# its tokens again as a prompt, with other roundings than verification's. So stock's tokens differ from stock's own.
MOVED_BY_RETRACTION = ("small pool", "forced retraction")


def has(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)


def passes_of(name: str) -> int:
    """How often a case serves its requests; with weight updates: before the first of them, and after each."""
    return 1 + len(updates_of(name)) if updates_of(name) else 1 if has(name, ONE_PASS) else 2


def updates_of(name: str) -> tuple[str, ...]:
    """Ways in which weights change between the passes of a case."""
    return IPC_UPDATES if "by IPC" in name else UPDATES if "weight updates" in name else ()


def gpus_of(name: str) -> int:
    return int(CASES[name].get("tp_size", 1))


def environment_of(name: str) -> dict[str, str]:
    """What the host reads from the environment.

    It cuts prompts of a deterministic server at multiples of a size that is 4096 by default: no chunk would ever be
    cut. On two GPUs it refuses to start where other engines hold unequal parts of their memory. A share of what the
    running requests may still say is kept free, so that none is retracted: in a small pool nothing is.
    """
    found = {"SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": "128"}
    if "small pool" in name:
        found |= {"SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0", "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1"}
    if "forced retraction" in name:
        found |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "13"}
    if gpus_of(name) > 1:
        found["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    return found


# What a request may ask for beside tokens, one thing each. A penalty counts the tokens of the verifications whose
# results the CPU has seen, so with overlap what is said under one depends on timing: stock's second pass differs from
# its first for half of them. No request is sampled: beside one, greedy requests draw among equal logits, by a coin of
# their node (case "chain, mixed sampling").
FEATURES: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.6}, {"presence_penalty": 0.8}, {"repetition_penalty": 1.3}, {"min_new_tokens": 24},
    {"stop_token_ids": [5, 17, 33, 101, 260, 300]}, {"stop": [" the", "a", "."]}, {"logprobs": 2},
    {"logit_bias": {"17": -8.0, "40": 1.5}},
)  # fmt: skip
# Shapes of an answer (case "chain, structured").
SHAPES: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{2,9}( [a-z]{1,9}){1,12}\\."}, {"ebnf": 'root ::= "f(" arg (", " arg)* ")"\narg ::= [a-z0-9_]+'},
    {"json_schema": json.dumps({
        "type": "object", "required": ["name", "size", "tags"], "properties": {
            "name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        },
    })},
)  # fmt: skip
PENALTIES = {"frequency_penalty", "presence_penalty", "repetition_penalty"}


def misshapen(asked: dict[str, Any], text: str) -> bool:
    """Whether a whole answer has not the shape that was asked for (of SHAPES)."""
    if "json_schema" in asked:
        try:
            found = json.loads(text)
        except ValueError:
            return True
        return not {"name", "size", "tags"} <= set(found) or not {"red", "green", "blue"}.issuperset(found["tags"])
    pattern = asked.get("regex") or (r"f\([a-z0-9_]+(, [a-z0-9_]+)*\)" if "ebnf" in asked else None)
    return pattern is not None and re.fullmatch(pattern, text) is None


def workload_of(name: str, prompts: Path) -> list[dict[str, Any]]:
    """The requests of a case."""
    if "acceptance" in name:
        return long_answers(prompts)
    if "no radix cache" in name:
        # Where a prompt that is cut at the multiple that a deterministic server asks for leaves room in its chunk, the
        # host cuts a second one there if that heeds no EOS, and takes the first for whole: EAGLE3 answered behind 128
        # of 361 tokens. Without a radix cache alone, in which it admits such requests otherwise.
        return [request | {"ignore_eos": False} for request in workload(prompts, 0.0)]
    share = 1.0 if "sampled" in name else 0.5 if "mixed sampling" in name else 0.0
    asked = FEATURES if "features" in name else SHAPES if "structured" in name else ()
    return workload(prompts, share, features=asked, times=2 if "many prompts" in name else 1)


def workload(
    prompts: Path, sampled: float, *, features: tuple[dict[str, Any], ...] = (), times: int = 1
) -> list[dict[str, Any]]:
    """Requests of mixed length, with shared prefixes and duplicates, in an order of arrival; some are aborted.

    `sampled` is the share of them that is (0, 1/2 or 1). Each asks for one of `features`, or for nothing.
    There are 137 that are not aborted, or about `times` as many.

    Sampled, all of them are: where one request of a prefill needs top-k, a greedy one included, the host draws for all
    of its requests by rank in place of by token id. So a seed's first token depends on what the request is beside.
    """
    import numpy

    text = numpy.load(prompts).astype(int).tolist()
    choose = random.Random(7)

    def cut(length: int) -> list[int]:
        start = choose.randrange(len(text) - length)
        return text[start : start + length]

    lengths = [choose.randint(1, 16) for _ in range(16 * times)] + [choose.randint(17, 128) for _ in range(40 * times)]
    lengths += [choose.randint(129, 600) for _ in range(30 * times)]
    lengths += [choose.randint(601, 1300) for _ in range(6 * times)]
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
    requests += [{"ids": cut(100), "new": 400, "ignore_eos": True, "at": 0.05 * n, "abort": 0.15} for n in range(8)]
    if features:
        for number, request in enumerate(requests):
            chosen = dict((*features, {})[number % (len(features) + 1)])
            if "min_new_tokens" in chosen:
                chosen["min_new_tokens"] = min(chosen["min_new_tokens"], request["new"])
            request["features"] = chosen
            request["ignore_eos"] &= features is not SHAPES  # a grammar ends with it
    for number, request in enumerate(requests):
        if number * sampled == int(number * sampled) and sampled:
            request |= {"temperature": 0.8, "sampling_seed": number}
    return requests


def long_answers(prompts: Path, count: int = 800, new: int = 128) -> list[dict[str, Any]]:
    """Prompts of 16 to 272 tokens, each with `new` of them to come: many verifications for little else."""
    import numpy

    text = numpy.load(prompts).astype(int).tolist()
    choose = random.Random(11)
    requests = []
    for number in range(count):
        length = choose.randint(16, 272)
        start = choose.randrange(len(text) - length)
        requests.append({"ids": text[start : start + length], "new": new, "ignore_eos": True, "at": 0.002 * number})
    return requests


def differing(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[int]:
    """Places of the requests that two passes both answer, and not with the same tokens."""
    pairs = enumerate(zip(one, other, strict=True))
    return [place for place, (a, b) in pairs if "ids" in a and "ids" in b and a["ids"] != b["ids"]]


def moved(stock: dict[str, Any], base: dict[str, Any]) -> list[int]:
    """Requests to which stock itself answers otherwise than without retraction (places in the first pass)."""
    return differing(stock["passes"][0]["requests"], base["passes"][0]["requests"])


def repeated(runs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """How far one algorithm agrees with itself, the yardstick for two that are compared.

    `passes`: places that differ between the first pass of the first run and its second, which finds the radix cache
    filled; `runs`: [run, pass, place] of what another engine of the same algorithm answered otherwise than the first.
    """
    first = runs[0]["passes"]
    return {
        "passes": [place for later in first[1:] for place in differing(first[0]["requests"], later["requests"])],
        "runs": [
            [number, turn, place]
            for number, run in enumerate(runs[1:], 1)
            for turn, (a, b) in enumerate(zip(first, run["passes"], strict=True))
            for place in differing(a["requests"], b["requests"])
        ],
    }


def by_position(by_correct: list[int]) -> list[float]:
    """Of drafts at each place of a window whose earlier ones were right, the part that was; `by_correct[n]` is how many
    verifications had n right ones.
    """
    reached = [sum(by_correct[place:]) for place in range(len(by_correct))]
    return [round(after / before, 4) for before, after in itertools.pairwise(reached) if before]


def summed(histograms: list[list[int]]) -> list[int]:
    return [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]


def compared(
    name: str, stock: dict[str, Any], ours: dict[str, Any], *, base: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Token for token, and accept counts, over all passes. `base`: stock's result without retraction, where known."""
    row: dict[str, Any] = {"case": name, "prompts": 0, "tokens": 0, "different": [], "accept_differs": 0, "errors": 0}
    sums = {"EAGLE3": [0, 0], "EAGLEX": [0, 0]}
    histograms: dict[str, list[list[int]]] = {"EAGLE3": [], "EAGLEX": []}
    counts = {"retracted": 0, "retracted_by_stock": 0, "cached": 0, "aborted": 0}
    after_retraction = []
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
                started_anew = a["retracted"] or b["retracted"]
                (after_retraction if started_anew else row["different"]).append([number, place, same, len(a["ids"])])
            for one, other in zip(a.get("logprobs") or (), b.get("logprobs") or (), strict=False):
                row["logprob_error"] = max(row.get("logprob_error", 0.0), abs(one - other))
            row["accept_differs"] += (a["verify"], a["correct"]) != (b["verify"], b["correct"])
            counts["retracted"] += b["retracted"]
            counts["retracted_by_stock"] += a["retracted"]
            counts["cached"] += b["cached"]
            for key, value in (("EAGLE3", a), ("EAGLEX", b)):
                sums[key][0] += value["correct"]
                sums[key][1] += value["verify"]
                histograms[key].append(value.get("histogram", []))
    accept = {key: 1 + correct / max(verify, 1) for key, (correct, verify) in sums.items()}
    row |= counts | {"accept_length": accept, "verifies": {key: value[1] for key, value in sums.items()}}
    row["accept_by_position"] = {key: by_position(summed(found)) for key, found in histograms.items()}
    row["accept_difference"] = differences(histograms["EAGLE3"], histograms["EAGLEX"])
    row["seconds"] = {x["algorithm"]: [round(p["seconds"], 2) for p in x["passes"]] for x in (stock, ours)}
    may_move = has(name, MOVED_BY_RETRACTION)
    if may_move:
        row["different_after_retraction"] = after_retraction
        if base is not None:
            row["stock_differs_from_itself"] = moved(stock, base)
            row["ours_differs_from_stock_unretracted"] = moved(ours, base)
    else:
        row["different"] += after_retraction
    failed = row["different"] or row["errors"] or (not may_move and row["accept_differs"]) or not row["prompts"]
    row["equal"] = not failed
    return row


def shown(row: dict[str, Any]) -> str:
    """One line of the table."""
    if row.get("missing"):
        return f"MISS {row['case']:28s} {row['missing']}"
    accept = "/".join(f"{value:.3f}" for value in row["accept_length"].values())
    verifies = "/".join(str(value) for value in row["verifies"].values())
    after = len(row.get("different_after_retraction", []))
    counts = {key: row[key] for key in ("prompts", "tokens", "accept_differs", "retracted", "errors", "seconds")}
    itself = row.get("stock_differs_from_itself", [])
    counts |= {f"{key} from itself": value for key, value in row.get("itself", {}).items()}
    return (
        f"{'ok  ' if row['equal'] else 'FAIL'} {row['case']:28s} different {len(row['different'])} accept {accept} "
        f"verifies {verifies} {counts} after retraction {after}, stock from itself {itself} "
        f"{row.get('first_error', '')}"
    )
