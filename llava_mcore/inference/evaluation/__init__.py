"""Scores of a model's answers."""
