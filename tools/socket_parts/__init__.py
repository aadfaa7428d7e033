"""Parts of tools/socket_check.py: the cases and their requests, one engine and its times, and the probe."""
