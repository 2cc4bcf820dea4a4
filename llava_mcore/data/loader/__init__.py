"""From stored samples to the batches of a step.

    storage/ --> task_encoder: encode --> packing: packs of seq_length tokens --> task_encoder: pixels, collate
                          one stream of them (open_stream, streams) has a position of its own
    loader process (loader_process) or this one (source): batches of its streams --> train_loader: the order of streams

`validation_data` reads every sample once instead.
"""
