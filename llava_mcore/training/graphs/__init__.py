"""CUDA graphs of layers."""
