"""Benchmarks against the best peers. Each measured run is a separate process. See README.md."""
