"""Using a model: questions in, answers, scores or a server out.

`generation/`: tokens of a Megatron model at tp x pp. `answering/`: the commands `generate`, `chat` and `evaluate`, for
Hugging Face folders (transformers) and Megatron checkpoints. `evaluation/`: metrics. `serving/`: `serve` and `demo`.
"""
