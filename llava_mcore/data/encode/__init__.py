"""Samples to tokens and pixels."""
