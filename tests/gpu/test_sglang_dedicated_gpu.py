"""The SGLang worker on a GPU with a dedicated drafter on another, or on the same where there is one.

The host is the stand-in that checks what each verification is given (tests/hosts/fake_engine_host.py), not SGLang.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from fake_engine_parts import Setting, TreeMaskMode
from test_sglang_dedicated import alone, comes_back, drafts_for_who_comes, follows, settled, started

pytestmark = pytest.mark.gpu


def options() -> dict[str, object]:
    return {
        "placement": "dedicated",
        "drafter_deadline": 20.0,
        "drafter_device": f"cuda:{min(1, torch.cuda.device_count() - 1)}",
    }


@pytest.mark.parametrize("name", ["chain", "no overlap", "prompts in pieces", "tree"])
def test_every_verification_is_given_the_reference_draft(name: str) -> None:
    setting = {
        "chain": Setting(device="cuda", options=options()),
        "no overlap": Setting(device="cuda", overlap=False, options=options()),
        "prompts in pieces": Setting(device="cuda", max_rows=1, options=options()),
        "tree": Setting(
            device="cuda", topk=3, steps=3, nodes=9, mask=TreeMaskMode.QLEN_ONLY, options=options()
        ),
    }[name]  # fmt: skip
    with started(setting, len(name)) as host:
        assert type(host.worker._draft_worker.client).__name__ == "RelayClient"
        follows(host)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_drafter_that_falls_costs_no_token(how: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    """One warning and one count; a killed one's successor drafts for requests that begin later."""
    chosen = options() | {"drafter_deadline": 2.0}
    with started(Setting(device="cuda", overlap=False, options=chosen), 4) as host:
        draft = host.worker._draft_worker
        alone(host, None)
        settled(host, drafts=True)
        settled(host, drafts=True)
        host.worker._stream.drain()
        os.kill(draft.process.pid, how)
        if how == signal.SIGKILL:
            os.waitid(os.P_PID, draft.process.pid, os.WEXITED | os.WNOWAIT)
        settled(host, drafts=True)  # drafted before it fell
        begun = time.monotonic()
        for _ in range(3):
            settled(host, drafts=False)
        assert time.monotonic() - begun < 3.0
        counts = draft.counters()
        assert (counts["gone"], counts["late"]) == ((1, 0) if how == signal.SIGKILL else (0, 1))
        assert sum("fell out of use" in record.message for record in caplog.records) == 1
        if how == signal.SIGSTOP:
            os.kill(draft.process.pid, signal.SIGCONT)
        else:
            comes_back(draft, 2)
        settled(host, drafts=False)  # rank 0 hears of it, and lets it rest
        time.sleep(1.5)
        settled(host, drafts=False)
        drafts_for_who_comes(host)
