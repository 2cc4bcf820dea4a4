"""The optimizer: its parameter groups and state, and gradients before its step."""
