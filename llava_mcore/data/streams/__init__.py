"""A run's streams of samples, built on energon."""
