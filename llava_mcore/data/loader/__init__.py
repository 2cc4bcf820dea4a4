"""From stored samples to the batches of a step.

<<<<<<< HEAD
    order/ --> sample_reader: read, cook, tokenize --> stream: packs of seq_length tokens
           --> task_encoder: pixels, collate --> delivery: from a loader process to this one (source)
           --> train_loader: batches of all streams in their order (turns)
=======
    storage/ --> task_encoder: encode --> packing: packs of seq_length tokens --> task_encoder: pixels, collate
                          one stream of them (open_stream, streams) has a position of its own
    loader process (loader_process) or this one (source): batches of its streams --> train_loader: the order of streams
>>>>>>> main

`validation_data` reads every sample once instead.
"""
