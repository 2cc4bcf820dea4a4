"""Reading and writing checkpoints tensor by tensor, in worker threads."""
