"""Media that a row names -> their bytes and sizes: images, sounds, lists of frames and video files."""
