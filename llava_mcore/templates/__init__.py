"""Chat templates by name, each a Jinja file in this folder; used by build and data."""
