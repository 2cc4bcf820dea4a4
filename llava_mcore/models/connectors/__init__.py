"""Projections from vision features to the language model's width."""
