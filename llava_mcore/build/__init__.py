"""Compose a Hugging Face LLaVA folder from a language model and a vision tower."""
