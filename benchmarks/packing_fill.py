"""How full long packs are, by the lengths of their samples, the multiple that these are rounded up to, and the budgets.

    python -m benchmarks.packing_fill

Lengths are drawn, and packed as the loader does with its default buffer: nothing is decoded. `images`: conversations
with one to six images of 256 to 2,400 tokens each; `mixed`: images, and videos of 8 to 128 frames of 64 to 256 tokens
each; `videos`: long ones, 10,000 tokens in the median; `texts`: short ones, 150 tokens in the median. With `patches`,
a pack may also have only four patches per token of its length.
"""

from __future__ import annotations

import argparse
import random
import time

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.loader.packing import PatchBudget, online_fill

PATCHES_PER_TOKEN = 4


def sample(draw: random.Random, kind: str) -> tuple[int, int]:
    """Return the tokens of a sample's text and media."""
    text = int(draw.lognormvariate(5, 0.9)) + 8
    share, image = draw.random(), int(draw.uniform(256, 2400))
    if kind == "texts" or (kind != "videos" and share < 0.1):
        return text, 0
    if kind == "images":
        return text, image * (1 if share < 0.8 else draw.randint(2, 6))
    if kind == "mixed":
        return text, image if share < 0.6 else draw.randint(8, 128) * draw.choice((64, 128, 256))
    return text, int(draw.lognormvariate(9.2, 0.6))


def main() -> None:
    """Print a table in Markdown."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seq-length", type=int, nargs="+", default=[32_768, 131_072, 1_048_576])
    p.add_argument("--multiple", type=int, nargs="+", default=[1, 4, 8], help="2 x --cp (default: 1 4 8)")
    p.add_argument("--packs", type=int, default=60, help="how many packs about (default 60)")
    args = p.parse_args()
    columns = [f"multiple {m}{end}" for m in args.multiple for end in ("", ", patches")]
    print(f"| seq_length | samples | {' | '.join(columns)} | ms per pack |\n|{'---|' * (len(columns) + 3)}")
    buffer_size = DataConfig().packing_buffer_size
    for seq_length in args.seq_length:
        for kind in ("images", "mixed", "videos", "texts"):
            draw, sizes, total = random.Random(0), list[tuple[int, int]](), 0
            while total < args.packs * seq_length or len(sizes) < 10 * buffer_size:
                sizes.append(sample(draw, kind))
                total += sum(sizes[-1])
            lengths = [min(text + media, seq_length) for text, media in sizes]
            most = PATCHES_PER_TOKEN * seq_length
            budget = PatchBudget([min(PATCHES_PER_TOKEN * media, most) for _, media in sizes], most)
            start, fills = time.perf_counter(), list[float]()
            for multiple in args.multiple:
                fills += [
                    online_fill(lengths, seq_length, buffer_size, media, multiple=multiple) for media in (None, budget)
                ]
            each = (time.perf_counter() - start) / len(fills) / (total / seq_length) * 1e3
            print(f"| {seq_length:,} | {kind} | {' | '.join(f'{f:.2%}' for f in fills)} | {each:.1f} |", flush=True)


if __name__ == "__main__":
    main()
