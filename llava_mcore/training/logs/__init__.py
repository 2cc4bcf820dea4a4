"""Metrics and the services that receive them."""
