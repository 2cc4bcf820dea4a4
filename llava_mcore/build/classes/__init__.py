"""The Hugging Face class of a built folder: one file for each kind of picture."""
