"""The Hugging Face classes that a build can write."""
