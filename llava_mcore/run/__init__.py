"""A training process, from its configuration to the loop."""
