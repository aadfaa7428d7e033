"""`eaglex doctor`'s line about the bridge: which transports ranks on this machine could use. Standard library only."""

from __future__ import annotations

from eaglex.doctor import Finding, Probe, Verdict

TOPIC = "bridge"
OLDEST_NCCL = 21800


def bridge(probe: Probe) -> Finding:
    """What drafts would travel over. Only the probe at a run's start, which copies real messages, decides."""
    extension, gpus = probe.get("extension", {}), probe.get("gpus", {})
    if not extension.get("info", {}).get("cuda") or not gpus.get("gpus"):
        return Finding(TOPIC, Verdict.OK, "shm, for ranks on CPUs; between GPUs it needs a CUDA build and GPUs")
    apart = [f"{i}-{j}" for i, j in gpus.get("without_p2p", []) if i < j]
    ways = ["p2p" if not apart else f"p2p (the driver says not for GPUs {', '.join(apart)})", "mailbox"]
    copies = probe.get("libraries", {}).get("libnccl.so", {})
    version = next(iter(copies.values()), None) if len(copies) == 1 else None
    if version is not None and version >= OLDEST_NCCL:
        ways.append("nccl")
    text = f"{', '.join(ways)}: the first that a probe finds to work when ranks start; --transport overrides"
    if version is not None and version < OLDEST_NCCL:
        return Finding(
            TOPIC, Verdict.WARN, f"{text}; libnccl {version}: expected at least {OLDEST_NCCL}",
            "update torch, or let drafts travel over p2p or mailbox",
        )  # fmt: skip
    return Finding(TOPIC, Verdict.OK, text)
