"""Benchmarks against the best peers, each measured run in a process of its own: see README.md."""
