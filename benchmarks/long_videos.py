"""CPU time and memory of taking frames from long video files, with and without decoding the segments between them.

    python -m benchmarks.long_videos

The files are of 25 frames per second, 320 x 240, H.264 with a keyframe every 10 seconds. `prepare` decodes only the
segments that have a kept frame; the other column decodes all up to the last kept frame, and both give the same JPEGs.
Memory is what a process takes beyond its imports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.prepare.media import video_files
from llava_mcore.prepare.sampling import Sampling
from tests.helpers.videos import moving_video

X264 = {"preset": "ultrafast", "g": "250", "keyint_min": "250", "x264-params": "scenecut=0"}
Measured = tuple[list[bytes], float, int]


def measure(path: Path, sampling: Sampling, everything: bool) -> Measured:
    """Return frames, CPU seconds and MiB of a process that takes them."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_measure, (path, sampling, everything))


def _measure(path: Path, sampling: Sampling, everything: bool) -> Measured:
    import av  # noqa: F401  (loaded before memory is counted)

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    decode = video_files._decode
    if everything:
        video_files._decode = lambda *args, all_packets: decode(*args, all_packets=True)
    with path.open("rb") as file:
        frames = video_files.decode_video(file, sampling, LIMITS).frames
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return frames, time.process_time() - start, used // 1024


def main() -> None:
    """Print a table in Markdown."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--frames", type=int, nargs="+", default=[2_000, 20_000], help="of the files")
    p.add_argument("--keep", type=int, nargs="+", default=[32, 128, 2_000], help="--video-max-frames")
    args = p.parse_args()
    print("| frames | kept | segments: s | MiB | everything: s | MiB |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for count in args.frames:
            path = moving_video(Path(folder) / f"{count}.mp4", count, options=X264, size=(320, 240))
            for keep in args.keep:
                (frames, seconds, used), (same, all_seconds, all_used) = (
                    measure(path, Sampling(2.0, keep), everything) for everything in (False, True)
                )
                assert frames == same, "the frames differ"
                row = (f"{count:,}", len(frames), f"{seconds:.1f}", used, f"{all_seconds:.1f}", all_used)
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
