"""eaglex: the EAGLE-3 draft model of a tensor-parallel server on one GPU."""

__version__ = "0.1.0.dev0"
