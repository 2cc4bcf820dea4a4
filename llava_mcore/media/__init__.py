"""Images, videos and audio clips in a batch: how many tokens each takes, and the names of their fields."""
