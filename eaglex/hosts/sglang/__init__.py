"""eaglex in SGLang: `--speculative-algorithm EAGLEX`, found through the entry point `sglang.srt.plugins`.

SGLang calls `register()` in every process that it starts. This module is cheap to import and imports nothing of SGLang.
"""

from __future__ import annotations

NAME = "EAGLEX"


def register() -> None:
    """Make the name `EAGLEX` known to SGLang in this process.

    SGLang only logs what a plugin raises. A launch stops all the same, because it then does not know the name: the
    launcher while it reads the arguments, a spawned scheduler while it builds itself (docs/sglang-socket.md). On a
    version that is not supported the name is known, and the arguments are refused with one sentence.

    Raises:
        ImportError: SGLang has no registry of algorithms (before 0.5.12).
        ValueError: the name is taken.
        TypeError: the host's algorithm interface has grown a method that is not answered here.
    """
    from eaglex.hosts.sglang import algorithm

    algorithm.register(NAME)
