"""From prepared webdataset shards to padded batches: samples, chat format, images, energon's loader."""
