"""Checks a dataset before training, with the functions that training uses."""
