"""Server arguments under eaglex's own engine: what is refused beside `arguments.REFUSED`, and how far it drafts."""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from eaglex.config import Sampling, SpeculationConfig
from eaglex.errors import ConfigError
from eaglex.hosts.sglang import NAME, compat
from eaglex.hosts.sglang.options import VARIABLE, Options, Placement
from eaglex.packed import Auto, DraftQuant

# option, allowed values, why another is refused
REFUSED: Final = (
    ("nnodes", (1,), "drafts reach the target's other ranks over memory that they share"),
    ("speculative_draft_load_format", (None, "auto", "safetensors"), "eaglex reads the draft's safetensors itself"),
    ("speculative_draft_attention_backend", (None,), "the engine has its own attention"),
)


DRAFTERS_OWN: Final = ("drafter_deadline", "drafter_device")
HOST_VARIABLES: Final = (  # of the host, with a dedicated drafter
    ("SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS", "rank 0 could not see the drafter's GPU"),
    ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "it rewrites the host's table unseen, and drafts would come from KV slots "
     "that are given back"),
)  # fmt: skip
QUANT_WORDS: Final[dict[str | None, DraftQuant | None]] = {"unquant": None, "fp8": DraftQuant.parse("fp8")}


def refuse(server_args: Any, options: Options) -> None:
    """Check the arguments as given, after those that EAGLEX refuses with any draft.

    Raises:
        ValueError: one sentence that names the option, its value and what would do.
    """
    for option, allowed, why in REFUSED:
        value = getattr(server_args, option)
        if value not in allowed:
            needed = " or ".join(repr(one) for one in allowed)
            raise ValueError(f"EAGLEX does not support {option}={value!r} (needs {needed}): {why}.")
    asked = server_args.speculative_draft_model_quantization
    if asked not in (None, *QUANT_WORDS, server_args.quantization):
        raise ValueError(
            f"EAGLEX does not support speculative_draft_model_quantization={asked!r} (needs "
            f"{' or '.join(map(repr, QUANT_WORDS))}): a packed draft is read as its files say, and {VARIABLE} "
            "draft_quant makes fewer bits of any other."
        )
    if options.placement is Placement.DEDICATED:
        _refuse_dedicated(server_args, options)
    else:
        refuse_unused(options, DRAFTERS_OWN, "placement='rank0'")
    if server_args.speculative_adaptive:
        if server_args.speculative_eagle_topk not in (None, 1):
            raise ValueError(
                f"EAGLEX does not support speculative_eagle_topk={server_args.speculative_eagle_topk!r} (needs 1) with "
                "speculative_adaptive=True: steps are left out of chains alone."
            )
        if options.pausing:
            raise ValueError(
                f"EAGLEX does not support {VARIABLE} pausing=true (needs false) with speculative_adaptive=True: the "
                "adaptive rule itself stops drafting where its configuration has 0 steps."
            )
        _admit_adaptive()


def refuse_unused(options: Options, names: tuple[str, ...], beside: str) -> None:
    """Options that would change nothing.

    Raises:
        ValueError: one of `names` is not what it is by default, with what is chosen `beside` it.
    """
    plain = Options()
    for name in names:
        if getattr(options, name) != getattr(plain, name):
            raise ValueError(f"EAGLEX does not support {VARIABLE} {name} with {beside}: nothing would read it.")


def _refuse_dedicated(server_args: Any, options: Options) -> None:
    placement = f"{VARIABLE} placement='dedicated'"
    if server_args.dp_size != 1:
        raise ValueError(
            f"EAGLEX does not support dp_size={server_args.dp_size} (needs 1) with {placement}: replicas would put "
            "their drafters on one another's GPUs."
        )
    for variable, why in HOST_VARIABLES:
        if os.environ.get(variable, "").lower() in ("1", "true", "yes", "y"):
            raise ValueError(f"EAGLEX does not support {variable}={os.environ[variable]} with {placement}: {why}.")
    drafter_device_of(server_args, options)
    found = {
        "pausing": options.pausing,
        "speculative_adaptive": bool(server_args.speculative_adaptive),
        "hot_vocab": options.hot_vocab is not None,
        "draft_quant 'auto'": options.draft_quant is Auto.AUTO,
    }
    for name, given in found.items():
        if given:
            raise ValueError(
                f"EAGLEX does not support {name} with {placement}: the drafter is not timed, and told less."
            )


def drafter_device_of(server_args: Any, options: Options) -> str:
    """Where a dedicated drafter drafts: cuda:N beside a target on GPUs, else the CPU.

    Raises:
        ValueError: there is no such GPU.
    """
    if server_args.device == "cpu":
        return "cpu"
    taken = _gpus_of_ranks(server_args)
    count = torch.cuda.device_count()
    if options.drafter_device is None:
        free = [index for index in range(count) if index not in taken]
        if not free:
            raise ValueError(
                f"EAGLEX does not support {VARIABLE} placement='dedicated' (needs 'rank0') on {count} GPUs with "
                f"tp_size={server_args.tp_size}: the drafter takes a further one."
            )
        return f"cuda:{free[0]}"
    if int(options.drafter_device.removeprefix("cuda:")) >= count:
        raise ValueError(
            f"EAGLEX cannot draft with {VARIABLE} drafter_device={options.drafter_device!r}: {count} GPUs are visible."
        )
    return options.drafter_device


def _gpus_of_ranks(server_args: Any) -> list[int]:
    first, step = server_args.base_gpu_id, server_args.gpu_id_step
    return [first + step * rank for rank in range(server_args.tp_size)]


def rank_on(server_args: Any, device: str) -> int | None:
    """The target's rank that has this device, cuda:N, to itself otherwise; None where there is none."""
    taken = [] if server_args.device == "cpu" else [f"cuda:{index}" for index in _gpus_of_ranks(server_args)]
    return taken.index(device) if device in taken else None


def _admit_adaptive() -> None:
    """The host turns adaptive steps off for every name but its own; let it answer for EAGLEX as for EAGLE3's chain."""
    plain = compat.symbol("adaptive_unsupported_reason")

    def reason(server_args: Any) -> str | None:
        found: str | None = None if server_args.speculative_algorithm == NAME else plain(server_args)
        return found

    compat.replace("adaptive_unsupported_reason", reason)


def quant_of(server_args: Any, options: Options) -> DraftQuant | Auto | None:
    """Fewer bits for the draft: by the option, else by the host's flag, which is the target's method where it is left
    open; a method that is not made at load leaves the draft as its files have it.
    """
    if options.draft_quant is not None:
        return options.draft_quant
    return QUANT_WORDS.get(server_args.speculative_draft_model_quantization)


def speculation_of(server_args: Any, options: Options) -> SpeculationConfig:
    """How far to draft, from the host's own flags after it has completed them; with adaptive steps, their most.

    Raises:
        ValueError: a flag is out of the engine's range; it names the flag.
    """
    steps, nodes = server_args.speculative_num_steps, server_args.speculative_num_draft_tokens
    if server_args.speculative_adaptive:
        nodes = server_args.max_speculative_num_draft_tokens
        steps = nodes - 1
    try:
        return SpeculationConfig(
            num_steps=steps,
            topk=server_args.speculative_eagle_topk,
            num_draft_tokens=nodes,
            sampling=Sampling.GREEDY,
            stop_below=options.stop_below,
        )
    except ConfigError as error:
        flags = ", ".join(
            f"{name}={getattr(server_args, name)}"
            for name in ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        )
        raise ValueError(f"EAGLEX cannot draft with {flags}: {error}.") from error


def max_rows_of(server_args: Any, options: Options, *, max_batch: int, num_draft_tokens: int) -> int:
    """Rows of one launch: a whole verification fits always, a prompt in several launches where it is longer."""
    chunk = server_args.chunked_prefill_size or 0
    wanted = options.max_rows or (min(chunk, options.DEFAULT_ROWS) if chunk > 0 else options.DEFAULT_ROWS)
    return max(wanted, max_batch * num_draft_tokens)
