"""Users' conversations and images in common formats -> energon shards.

`sources/`: files -> rows; `shard_plan.py`: the rows of each shard; `record_layouts.py` and `media/`: rows ->
conversations; `output/`: conversations -> shards and .nv-meta. `prepare_source.py` connects them.
"""
