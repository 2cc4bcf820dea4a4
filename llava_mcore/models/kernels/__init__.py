"""Kernels in Triton, imported on GPUs only; `chunk_operations.py` is in torch, for all devices."""
