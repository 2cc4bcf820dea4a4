"""Samples to tokens: the conversation in a sample, its text by the chat template, its tokens with those of media."""
