"""The data that training reads. A sample goes from its shard to the loss like this (encode/… is data/encode/…):

    +-------------------------------------------------------------+
    | shard: a tar with an index, on a disk or in an object store |
    +-------------------------------------------------------------+
       |  order/stream_order.py                which sample is next (order/dataset_order.py)
       |  loader/sample_reader.py              reads it by its number, and tokenizes it: down to TokenSample
       |  storage/shard_reader.py              one read per sample (storage/tar_files.py)
       v
    +----------------------------------+
    | parts of a sample: bytes by name |
    +----------------------------------+
       |  encode/conversation.py               turns (encode/messages.py), media as bytes (encode/sample_media.py)
       v
    +---------------------------------------------+
    | ChatSample: turns with marks, encoded media |
    +---------------------------------------------+
       |  encode/encode.py                     stored tokens, or those of the text:
       |  encode/chat_format.py                    chat template (encode/chat_text.py, encode/render.py), tokenizer
       |  encode/tokens.py                     an id for each feature of an image (media/media.py)
       v
    +---------------------------------------------------------+
    | TokenSample: ids, mask of trained tokens, encoded media |
    +---------------------------------------------------------+
       |  loader/stream.py                     several in one row, with data.packing (loader/packing.py)
       |  processors/images.py                 decoded; then data.augment (encode/augment.py)
       |  processors/image_processor.py        what the tower takes; processors/audio_processor.py for audio
       v
    +-------------------------------------------+
    | EncodedSample: the same with pixel values |
    +-------------------------------------------+
       |  loader/collate.py                    padded, indices shifted
       v
    +----------------------------------+
    | Batch: a micro-batch on the host |
    +----------------------------------+
       |  loader/stream.py                     the next of a stream, in a loader process
       |  loader/source.py                     from that process to this one
       |  loader/train_loader.py               in the order of all streams
       |  training/fetch.py                    a step's micro-batches
       |  parallel/share.py                    from the rank that reads to the others of its model replica
       v
    +---------------------------+
    | MicroBatch: on the device |
    +---------------------------+
       |  training/step.py                     megatron-core's schedule calls the model
       |  models/multimodal.py                 tower, connector, features at their placeholders, decoder
       |  models/language/decoder.py           hidden states of the tokens
       |  models/loss/linear_cross_entropy.py  logits by chunks
       v
    +--------------------+
    | loss of each token |
    +--------------------+

`loader/task_encoder.py` has the steps from ChatSample to Batch with the settings of a run. Each is stateless, so a
position in the data can be restored exactly. Samples are shuffled as numbers; media are decoded after packing, so what
waits for its pack is encoded.
"""
