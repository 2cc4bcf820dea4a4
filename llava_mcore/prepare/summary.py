"""Summary of a run: tables and histograms on the console, and histograms as PNG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from llava_mcore.data.encode.marks import LITERAL_REASON, TYPES
from llava_mcore.errors import counted
from llava_mcore.media.media import DEFAULT_FPS
from llava_mcore.prepare.counts import BINS_PER_OCTAVE, Histogram, add_up
from llava_mcore.prepare.prepare_source import SKIPPED, Result
from llava_mcore.prepare.row_types import FILLED, MISCOUNTED, THOUGHTLESS

BAR_WIDTH = 40
MOST_NAMES = 20
"""Unused keys and unknown roles to list."""
FIGURES: Mapping[str, tuple[str, str]] = {
    "tokens": ("tokens.png", "tokens of a conversation, media included"),
    "sides": ("pixels.png", "longer side of an image or frame in pixels"),
}


def show(console: Console, results: Sequence[Result]) -> None:
    """Print the table of all sources, the reasons of skipped rows, and the histograms."""
    # Totals and skipped rows.
    console.print(_totals(results))
    reasons = [(r, reason, count) for r in results for reason, count in r.counts.reasons.most_common()]
    if reasons:
        table = Table("source", "skipped because", "rows", box=box.SIMPLE, title="Skipped rows")
        for result, reason, count in reasons:
            table.add_row(result.folder.name, reason, f"{count:,}")
        console.print(table)
    # What was read otherwise than its author may think.
    for result in results:
        for line in (*result.notes, *_notes(result)):
            console.print(f"{result.folder.name}: {line}", markup=False, soft_wrap=True)
        for token, count in result.counts.typed.most_common():
            reading = "read as text" if result.special_tokens_in_text == "text" else "read as the token"
            why = "(--special-tokens-in-text)"
            if token in TYPES:  # a mark, or it would not be in the text
                reading, why = "read as text:", LITERAL_REASON
            elif token in result.mark_advice:
                why = f"{why}; {result.mark_advice[token]}"
            console.print(
                f"{result.folder.name}: {counted(count, 'sample')} with {token} in the text; it is {reading} {why}",
                markup=False,
                soft_wrap=True,
            )
    for result in results:
        if result.counts.without_fps and result.timed:
            console.print(
                f"{result.folder.name}: {result.counts.without_fps:,} of {result.counts.videos:,} videos have no fps; "
                f"models that use times count them as {DEFAULT_FPS:g} frames per second (--frames-fps gives another "
                "number)",
                markup=False,
                soft_wrap=True,
            )
    # Lengths and sizes.
    for result in results:
        for histogram, name in ((result.counts.tokens, "tokens"), (result.counts.sides, "sides")):
            if histogram.count:
                console.print(_bars(histogram, f"{result.folder.name}: {FIGURES[name][1]}"))


def _notes(result: Result) -> list[str]:
    """Return lines about what was not read, and about what the chat template does with the samples."""
    counts, lines = result.counts, []
    if counts.unused:
        lines.append(f"not used: {_listed(counts.unused, 'row')}")
    if counts.roles:
        lines.append(f"unknown roles: {_listed(counts.roles, 'row')}")
    if counts.notes[FILLED] and result.own_text_warning is not None:
        lines.append(f"warning: in {counted(counts.notes[FILLED], 'sample')}, {result.own_text_warning}")
    if counts.notes[THOUGHTLESS]:
        lines.append(
            f"not used: the reasoning of answers in "
            f"{counted(counts.notes[THOUGHTLESS], 'sample')}; the chat template does not render it"
        )
    if counts.notes[MISCOUNTED]:
        lines.append(
            f"{counted(counts.notes[MISCOUNTED], 'sample')} with a video file whose header has a wrong number of "
            f"frames, which was not used. One is {min(counts.miscounted)}"
        )
    return lines


def _listed(names: Counter[str], noun: str) -> str:
    listed = [f"{name} in {counted(count, noun)}" for name, count in names.most_common(MOST_NAMES)]
    more = len(names) - len(listed)
    return ", ".join(listed) + (f", and {more} more" if more else "")


def _totals(results: Sequence[Result]) -> Table:
    """Return a table with one column per source, and one for all of them."""
    # One column per source, and one for all.
    counts = [result.counts for result in results]
    names = [result.folder.name for result in results]
    seconds = [result.seconds for result in results]
    rows_made = [result.rows_made for result in results]
    shards = [(result.num_shards, result.num_made) for result in results]
    columns = [[result] for result in results]
    if len(results) > 1:
        names.append("all")
        columns.append(list(results))
        counts.append(add_up(counts))
        seconds.append(sum(seconds))
        rows_made.append(sum(rows_made))
        shards.append((sum(total for total, _ in shards), sum(written for _, written in shards)))
    # Rows of what the sources do not have are left out.
    table = Table("", *names, box=box.SIMPLE, title="Prepared")
    table.add_row("samples", *(f"{c.conversations:,}" for c in counts))
    if any(c.entries != c.conversations for c in counts):
        table.add_row("packs", *(f"{c.entries:,}" for c in counts))
    table.add_row("skipped", *(f"{c.skipped:,} ({c.skip_rate:.2%})" for c in counts))
    table.add_row("tokens", *(f"{c.tokens.total:,}" if c.tokens.count else "not counted" for c in counts))
    if any(c.images for c in counts) or not any(c.audios for c in counts):
        table.add_row("images", *(f"{c.images:,}" for c in counts))
    if any(c.videos for c in counts):
        table.add_row("videos", *(f"{c.videos:,} ({counted(c.frames, 'frame')})" for c in counts))
    if any(c.audios for c in counts):
        table.add_row("audio clips", *(f"{c.audios:,} ({c.audio_seconds / 3600:,.2f} h)" for c in counts))
    table.add_row("shards", *(f"{total:,} ({written:,} new)" for total, written in shards))
    for part in ("train", "val"):
        if any("val" in result.parts for result in results):
            table.add_row(part, *(_size_of_part(chosen, part) for chosen in columns))
    table.add_row("size", *(_size(c.bytes) for c in counts))
    table.add_row("seconds", *(f"{s:,.1f}" for s in seconds))
    table.add_row("samples/s", *(f"{m / s:,.0f}" if m else "-" for m, s in zip(rows_made, seconds, strict=True)))
    return table


def _size_of_part(results: Sequence[Result], part: str) -> str:
    """Return how many shards and samples of some sources are for training, or for validation."""
    parts = [result.parts[part] for result in results if part in result.parts]
    shards, samples = sum(p.shards for p in parts), sum(p.samples for p in parts)
    return f"{counted(shards, 'shard')} ({counted(samples, 'sample')})"


def _bars(histogram: Histogram, title: str) -> Table:
    """Return a bar chart with half an octave per line."""
    step = BINS_PER_OCTAVE // 2
    lines: dict[int, int] = {}
    for index, count in histogram.bins.items():
        lines[index // step] = lines.get(index // step, 0) + count
    largest = max(lines.values())
    mean = histogram.total / histogram.count
    caption = f"mean {mean:,.0f}, largest {histogram.largest:,}"
    table = Table("from", "number", "", box=box.SIMPLE, title=title, caption=caption, show_edge=False)
    for line in range(min(lines), max(lines) + 1):
        count = lines.get(line, 0)
        table.add_row(f"{_edge(line * step):,}", f"{count:,}", "█" * round(BAR_WIDTH * count / largest))
    return table


def _edge(index: int) -> int:
    """Return the smallest integer of a bin."""
    return -int(-(2 ** (index / BINS_PER_OCTAVE)) // 1)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def draw(result: Result) -> list[Path]:
    """Write a PNG of each histogram that is not empty and return their paths."""
    histograms = {"tokens": result.counts.tokens, "sides": result.counts.sides}
    written = []
    for name, (file, label) in FIGURES.items():
        if histograms[name].count:
            _draw(histograms[name], label, result.folder / file)
            written.append(result.folder / file)
    return written


def _draw(histogram: Histogram, label: str, path: Path) -> None:
    import matplotlib  # the import takes a second

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    bins = range(min(histogram.bins), max(histogram.bins) + 1)
    edges = [2 ** (b / BINS_PER_OCTAVE) for b in (*bins, bins.stop)]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.stairs([histogram.bins.get(b, 0) for b in bins], edges, fill=True)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel(label)
    axes.set_ylabel("number")
    mean = histogram.total / histogram.count
    axes.axvline(mean, color="black", linewidth=1, linestyle="--")
    axes.set_title(f"{histogram.count:,} in all, mean {mean:,.0f}, largest {histogram.largest:,}", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def failures(results: Sequence[Result], max_skip_rate: float) -> list[str]:
    """Return messages about the sources that were not completed."""
    told = []
    for result in results:
        if result.finished:
            continue
        counts = result.counts
        if not counts.rows:
            told.append(f"{result.folder}: the source has no rows")
            continue
        advice = (
            "The shards are written, but the dataset is not completed (no .nv-meta): with a higher --max-skip-rate the "
            "same command "
        )
        told.append(
            f"{result.folder}: {counts.skipped:,} of {counted(counts.rows, 'row')} skipped "
            f"({counts.skip_rate:.2%}, --max-skip-rate is {max_skip_rate:.2%}). "
            + (f"{advice}completes it at once." if counts.conversations else "None became a sample.")
            + f" All skipped rows are in {result.folder / SKIPPED}; the first are:"
            + "".join(f"\n{line}" for line in result.first_skipped)
        )
    return told
