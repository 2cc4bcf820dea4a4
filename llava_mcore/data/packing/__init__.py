"""Which samples go together."""
