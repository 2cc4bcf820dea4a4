"""Conversations -> tar files, and tar files -> a dataset with energon's index."""
