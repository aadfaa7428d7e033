"""Hosts of the engine: what owns the target and drives the cycle. Each host's imports stay in its own module."""
