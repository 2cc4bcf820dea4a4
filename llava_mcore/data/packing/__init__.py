"""Packing of samples into sequences."""
