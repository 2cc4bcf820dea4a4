"""One file for each Hugging Face class."""
