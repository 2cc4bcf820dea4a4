"""Compose a Hugging Face folder from a language model and a vision tower."""
