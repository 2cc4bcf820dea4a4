"""Media that a row names -> their bytes and sizes: images, audio clips, lists of frames and video files."""
