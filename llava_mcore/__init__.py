"""Megatron-Core based 3D-parallel training of vision-language models."""

__version__ = "0.1.0"
