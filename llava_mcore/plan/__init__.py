"""Predictions of memory and time of a training run from its shapes alone, and the layouts that fit."""
