"""Parts of tools/serve_bench.py."""
