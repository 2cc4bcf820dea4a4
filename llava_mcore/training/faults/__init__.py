"""What can go wrong during training, and what is done about it."""
