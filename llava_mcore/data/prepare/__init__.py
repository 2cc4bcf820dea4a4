"""Users' conversations and pictures in common formats -> energon shards.

source files -> plan (rows of each shard) -> rows -> conversations -> shards -> .nv-meta
"""
