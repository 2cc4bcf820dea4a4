"""Bytes on disk: regular files of untrusted paths, files and folders that appear whole, locks, Hugging Face folders."""
