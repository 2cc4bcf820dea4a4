"""Images, videos and audio clips: from bytes to tensors, by the processors of the checkpoint.

image_header, audio_files: the size of an image, the length of a clip, without decoding it
images, audio_files: decoded pixels and waves
image_processor, audio_processor: what the tower takes, with the settings that `load` has read
"""
