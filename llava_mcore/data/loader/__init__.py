"""From stored samples to the batches of a step.

    order/ --> sample_reader: read, cook, tokenize --> stream: packs of seq_length tokens, or single samples
           --> task_encoder: pixels, collate --> source: from a loader process (loader_process) to this one
           --> train_loader: batches of all streams in their order (turns)

`validation_data` reads every sample once instead.
"""
