"""Server arguments under EAGLEX: what is refused, in one sentence each, and what is set."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

from eaglex.hosts.sglang import compat, engine_arguments, options

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refused:
    """An option of the host that EAGLEX does not serve: every value but `allowed` is refused."""

    option: str
    allowed: Any
    why: str


DRAFT_BACKEND: Final = "triton"
REFUSED: Final = (
    Refused("device", "cuda", "the draft runs on a CUDA stream"),
    Refused("pp_size", 1, "the draft needs all auxiliary layers on one rank"),
    Refused("dcp_size", 1, "the draft's KV pool is indexed by the host's slots, untranslated"),
    Refused("enable_dp_attention", False, "ranks would draft different batches"),
    Refused("enable_two_batch_overlap", False, "it splits the batch that is drafted for"),
    Refused("enable_pdmux", False, "it runs prefill beside decode, and drafts would overlap both"),
    Refused("disaggregation_mode", "null", "drafts stay on the device that prefilled"),
    Refused("enable_attn_tp_input_scattered", False, "hidden states would reach the draft scattered over the ranks"),
    Refused("enable_unified_memory", False, "the draft's KV pool is indexed by the host's slots, untranslated"),
    Refused("enable_hierarchical_cache", False, "the draft's KV would not come back with the target's"),
    Refused("enable_hisparse", False, "the draft's KV pool is indexed by the host's slots, untranslated"),
    Refused("enable_multi_layer_eagle", False, "it runs one head per step"),
    Refused("speculative_draft_window_size", None, "the draft reads the whole prefix"),
)
UNREAD_BY_HOST_DRAFT: Final = (
    "placement", *engine_arguments.DRAFTERS_OWN, "pausing", "draft_quant", "hot_vocab", "token_table_bytes"
)  # fmt: skip
HOST_DRAFT_REFUSED: Final = (
    Refused("speculative_adaptive", False, "the host's own draft runs a fixed number of steps"),
)


def refuse(server_args: Any) -> None:
    """Check the arguments as given, before the host completes them.

    Raises:
        ValueError: one sentence that names the option, its value and what would do.
    """
    sentence = compat.refusal(compat.installed_version())
    if sentence is not None:
        raise ValueError(sentence)
    chosen = options.read()
    own = chosen.drafter is options.Drafter.ENGINE
    for refused in REFUSED if own else REFUSED + HOST_DRAFT_REFUSED:
        value = getattr(server_args, refused.option)
        if value != refused.allowed:
            raise ValueError(
                f"EAGLEX does not support {refused.option}={value!r} (needs {refused.allowed!r}): {refused.why}."
            )
    backend = server_args.speculative_draft_attention_backend
    if own:
        engine_arguments.refuse(server_args, chosen)
    else:
        engine_arguments.refuse_unused(chosen, UNREAD_BY_HOST_DRAFT, "drafter='host'")
    if not own and backend not in (None, DRAFT_BACKEND):
        raise ValueError(
            f"EAGLEX does not support speculative_draft_attention_backend={backend!r} (needs {DRAFT_BACKEND!r}): "
            "drafted tokens have KV slots of their own, which only a backend that reads a slot per token can follow."
        )
    if server_args.speculative_draft_model_path is None:
        raise ValueError("EAGLEX needs speculative_draft_model_path, an EAGLE-3 head, and got None.")
    architectures = draft_architectures(server_args)
    if any(name.startswith("Gemma4") for name in architectures):  # as the host refuses it under EAGLE3
        raise ValueError(
            f"EAGLEX needs an EAGLE-3 head as draft model, and {server_args.speculative_draft_model_path} declares "
            f"architectures={architectures}."
        )


def draft_architectures(server_args: Any) -> list[str]:
    """The architectures in the draft's config.json, as the host reads it."""
    config = compat.symbol("get_config")(
        server_args.speculative_draft_model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.speculative_draft_model_revision,
    )
    return list(getattr(config, "architectures", None) or [])


def complete(server_args: Any) -> None:
    """Set what EAGLEX needs and the user left open: the host's draft needs its attention backend.

    Raises:
        ValueError: eaglex's engine cannot draft as far as the arguments say; one sentence that names them.
    """
    chosen = options.read()
    if chosen.drafter is options.Drafter.ENGINE:
        engine_arguments.speculation_of(server_args, chosen)
        return
    if server_args.speculative_draft_attention_backend is None:
        server_args.speculative_draft_attention_backend = DRAFT_BACKEND
        logger.info("EAGLEX: speculative_draft_attention_backend is set to %r.", DRAFT_BACKEND)
