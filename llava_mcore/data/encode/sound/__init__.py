"""Sound: files -> samples of a wave -> what the model's encoder reads."""
