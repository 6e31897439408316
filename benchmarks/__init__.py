"""Benchmarks: how close to the speed limit, how much memory, and how it compares with other libraries."""
