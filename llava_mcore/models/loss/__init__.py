"""The output layer and the loss."""
