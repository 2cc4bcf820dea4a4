"""Hugging Face folders and Megatron checkpoints on disk."""
