"""Kernels in Triton, imported on GPUs only."""
