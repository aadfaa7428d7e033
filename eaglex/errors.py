"""The exceptions that eaglex raises. Each message names the field, the expected and the actual value."""


class EaglexError(Exception):
    """Base of every error raised by eaglex, in Python and in C++."""


class ConfigError(EaglexError, ValueError):
    """A configuration that cannot work: a field out of range or two that contradict each other."""


class ShapeError(EaglexError, ValueError):
    """A tensor whose shape, stride, dtype or device is not what its field requires."""


class CheckpointError(EaglexError, ValueError):
    """A checkpoint that is not exactly one of the dialects that eaglex reads."""


class DeviceError(EaglexError, RuntimeError):
    """The device or its runtime failed, or the build lacks it."""


class BridgeError(EaglexError, RuntimeError):
    """A peer is late, gone or configured differently."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, to be quoted in one of ours, with the next where it ends in a colon.

    "" where the error says nothing.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
