"""Reads prepared webdataset shards and builds batches: samples, chat format, images, energon's loader."""
