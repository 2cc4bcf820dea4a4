"""Which sample a stream reads next: numbers only, computed from the seed and a position, without reading anything.

dataset_order   one dataset: position 0, 1, 2, ... --> (pass, index of the sample)
mixture         a blend: weights --> the dataset of the next sample
stream_order    one stream: its counters --> (dataset, pass, index); the counters are its position
"""
