"""Bytes on disk."""
