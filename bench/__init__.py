"""Benchmarks: each module prints one JSON object a figure, with a baseline measured in the same run."""
