"""Benchmarks of kittens_torch against the other attention kernels that are installed: ``python -m benchmarks.run``."""
