"""From options to command lines: torchrun and Singularity. Knows nothing of models or data."""
