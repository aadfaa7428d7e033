"""eaglex.drafter on the emulated device: `emulated_drafter.py MODULE PARENT`, with the job on stdin."""

from __future__ import annotations

import sys
from pathlib import Path

import eaglex.bridge
import eaglex.bridge_dedicated
import eaglex.drafter
import eaglex.engine
from support import emulated

module = emulated.load(Path(sys.argv[1]))
for part in (eaglex.engine, eaglex.bridge, eaglex.bridge_dedicated):
    part._extension = lambda: module  # type: ignore[attr-defined]
sys.exit(eaglex.drafter.main(sys.argv[2:]))
