"""Faults during training, and how they are handled."""
