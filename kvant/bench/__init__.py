"""Benchmarks of attention, append, prefill and generation. Every operation is checked against the reference before it is timed."""
