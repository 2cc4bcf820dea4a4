"""Mapping between Hugging Face and Megatron weights: entries, layouts, names, slices. Pure torch, no process groups."""
