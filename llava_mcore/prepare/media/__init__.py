"""Media that a row names -> their bytes and sizes: pictures, sounds, lists of frames and video files."""
