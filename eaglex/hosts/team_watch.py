"""Ends what a GPU waits for when a rank is lost: a collective of the target would wait in the device for ever, and the
host with it. NCCL's own watchdog ends the process too, but cannot say which rank it was.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from eaglex.errors import BridgeError

if TYPE_CHECKING:
    from eaglex.bridge import Bridge

LOOK_SECONDS = 0.1
# For the host to say by itself what is wrong, then after its collectives were ended.
GRACE_SECONDS = 1.0


class TeamWatch:
    """A thread that looks at the bridge until `stop`: where the group has ended, or a collective has taken `deadline`
    seconds, the target's collectives are aborted; the host's wait ends and finds the reason in the bridge. A host that
    still does not move is ended, with that reason on stderr.
    """

    def __init__(self, bridge: Bridge, deadline: float) -> None:
        self._bridge, self._deadline = bridge, deadline
        self._since: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eaglex-watch", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A collective of the target begins."""
        self._since = time.monotonic()

    def end(self) -> None:
        """All that have begun have ended."""
        self._since = None

    def stop(self) -> None:
        """The host is leaving in order, or with an error of its own."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            reason = self._reason()
            if reason is None:
                continue
            if self._stopped.wait(GRACE_SECONDS):
                return
            _abort()
            if not self._stopped.wait(GRACE_SECONDS):
                print(f"eaglex: error: {reason}", file=sys.stderr, flush=True)
                os._exit(1)
            return

    def _reason(self) -> str | None:
        since = self._since
        try:
            self._bridge.check()
        except BridgeError as error:
            return str(error)
        if since is None or time.monotonic() - since < self._deadline:
            return None
        verdict = self._bridge.verdict()
        if verdict is None:
            verdict = f"a collective of the target has not ended within {self._deadline:g} s"
            self._bridge.end(verdict)
        return verdict


def _abort() -> None:
    """End the collectives that wait in the device, on this rank alone."""
    with contextlib.suppress(RuntimeError, ValueError):
        group: Any = dist.group.WORLD
        if group is not None:
            group.abort()
