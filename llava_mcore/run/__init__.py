"""Launching a run, and its training processes."""
