"""What an image, a video or an audio clip becomes in a batch: how many tokens it takes, and the names of its fields."""
