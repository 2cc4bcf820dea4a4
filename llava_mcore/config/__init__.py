"""The configuration of a run: schema, reading, and rules between its sections. Does not import torch."""
