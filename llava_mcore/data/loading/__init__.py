"""Loads batches in separate processes."""
