"""GPUs: published figures, what is reached of them, and what was measured on those at hand."""
