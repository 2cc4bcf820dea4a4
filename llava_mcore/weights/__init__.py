"""Declarative mapping between Hugging Face and Megatron weights: pure torch, no process groups."""
