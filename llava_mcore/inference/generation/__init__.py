"""Answers of a model on megatron-core at tp x pp, with a key/value cache."""
