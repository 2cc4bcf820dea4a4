"""Language models: megatron-core's decoder with layers of our own, and `families/`, one file per family."""
