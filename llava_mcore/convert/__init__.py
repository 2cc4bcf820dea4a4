"""Hugging Face folders to Megatron checkpoints and back.

`import_hf.import_hf` takes these steps:

1. `open_folder` reads config.json and the headers of the weight files (`HfFolder`, files/hf_folder.py), and checks tp x
   pp.
2. `model_and_table` builds the model without memory (`meta_model`) and its `MappingTable`, an `Entry` for each Megatron
   tensor. `check_coverage` compares names and shapes on both sides, `check_shard_rules` how ranks divide them.
3. `planned_weights` (io/parameters.py) makes an `EntryWrite` of each entry: its pieces in the checkpoint
   (`TensorChunk`), and where its Hugging Face tensors are in files (`TensorAt`).
4. `written_beside` (files/atomic.py) checks the room on the disk, locks the target and makes an empty folder beside it.
5. `save_streamed` (io/streamed_save.py) lets megatron-core plan the checkpoint from tensors without data. `write_file`
   writes one file in a worker thread: it maps the tensors of an entry, applies its transform if that does more than
   join rows, hashes, and writes.
6. `_write_companions`, `write_manifest` and `write_checksums` add config, tokenizer, processor, unused tensors, the
   SHA-256 of every tensor and the checksum of every file.
7. With `verify`, `CheckpointWeights.digests` reads everything back as an export does. `write_tracker` points to the
   iteration, and the folder gets its name.

`export_hf.export_hf` goes back: `CheckpointWeights` (megatron_weights.py) finds the chunks of every parameter in the
checkpoint's metadata, `planned_files` lays out the safetensors files, and `export_entries` (io/export_jobs.py) writes
each tensor at its offset.

The bytes are written by hand: on two cores, torch's own `FileSystemWriter` took longer for the same memory-mapped
tensors than conversions may (1.25 times `cp`), even before one was hashed. It would also keep no hash or checksum of
what it writes, and fill the page cache with a checkpoint that nobody reads soon.
"""
