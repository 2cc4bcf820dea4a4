"""A run's streams of samples, on energon."""
