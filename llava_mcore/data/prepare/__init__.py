"""Users' conversations and pictures in any usual format -> energon shards.

source files -> plan (which rows make which shard) -> rows -> conversations -> shards -> .nv-meta
"""
