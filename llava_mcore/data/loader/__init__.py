"""From stored samples to the batches of a step.

    order/ --> sample_reader: read, cook, tokenize --> stream: packs of seq_length tokens
           --> task_encoder: pixels, collate --> delivery: from a loader process to this one (source)
           --> train_loader: batches of all streams in their order (turns)

`validation_data` reads every sample once instead.
"""
