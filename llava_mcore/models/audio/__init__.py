"""Audio: the encoder of Qwen2-Audio, and how clips become its frames and tokens."""
