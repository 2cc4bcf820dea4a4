"""Which sample a stream reads next: numbers only, computed from the seed and a position, without reading anything.

dataset_order   one dataset: position 0, 1, 2, ... --> (pass, index of the sample)
stream_order    one stream of a blend: weights --> a dataset, then its order --> (dataset, pass, index); its position
"""
