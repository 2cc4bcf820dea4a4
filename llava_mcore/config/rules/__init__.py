"""Rules for configurations."""
