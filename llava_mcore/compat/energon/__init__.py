"""Patches and private names of megatron-energon 7.4."""
