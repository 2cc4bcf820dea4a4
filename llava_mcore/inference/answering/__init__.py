"""The commands that answer questions: from Hugging Face folders by transformers, from Megatron checkpoints by
`generation`."""
