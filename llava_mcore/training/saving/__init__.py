"""Saving a run: what is saved, how, and how long it took."""
