"""The supported Hugging Face classes, one file each."""
