"""Batches, from processes of their own."""
