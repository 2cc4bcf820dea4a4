"""Reading and writing checkpoints tensor by tensor."""
