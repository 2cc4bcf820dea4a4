"""Megatron checkpoints on disk."""
