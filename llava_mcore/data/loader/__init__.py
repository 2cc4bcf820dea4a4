"""From stored samples to the batches of a step.

    order/ --> sample_reader: read, cook, tokenize --> stream: packs of seq_length tokens --> task_encoder: pixels, collate
                                                       each stream has a position of its own
    loader process (delivery) or this one (source): batches of its streams --> train_loader: the order of streams (turns)

`validation_data` reads every sample once instead.
"""
