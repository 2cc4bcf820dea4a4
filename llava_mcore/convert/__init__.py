"""Hugging Face folders to Megatron checkpoints and back."""
