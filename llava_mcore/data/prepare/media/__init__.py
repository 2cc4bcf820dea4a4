"""What a row names -> its bytes and size: pictures, sounds, lists of frames and video files."""
