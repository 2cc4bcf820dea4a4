"""Layers of towers."""
