"""The report on the console."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from llava_mcore.check_data.report import NUM_BINS, DataReport
from llava_mcore.check_data.tally import Group, bins
from llava_mcore.data.storage.dataset_path import NO_TRAINING_ON_PAIRS
from llava_mcore.errors import counted
from llava_mcore.media.media import DEFAULT_FPS

BAR = 40
MOST_NAMES = 20
"""Unused keys to list."""
LEVELS = {"stop": "would end training", "left out": "would be left out"}


def print_report(report: DataReport, console: Console) -> None:
    """Print datasets, lengths and problems; the last line says whether to train."""
    tally = report.tally
    if tally.num_looked_at:
        _print_datasets(report, console)
        _print_lengths(report, console)
    for problem in report.stop:
        _line(console, f"problem: {problem}", style="red")
    for level in ("stop", "left out", "remark"):
        for group in tally.problems(level):
            _print_group(group, console)
    # Notes: nothing here prevents training.
    for remark in report.remarks:
        _line(console, f"note: {remark}")
    if tally.num_without_fps:
        _line(
            console,
            f"note: {tally.num_without_fps} of {sum(n * c for n, c in tally.videos.items())} videos have no fps and "
            f"count as {DEFAULT_FPS:g} frames per second: prepare the data with --frames-fps",
        )
    if tally.unused:
        names = ", ".join(
            f"{name} in {counted(count, 'sample')}" for name, count in tally.unused.most_common(MOST_NAMES)
        )
        _line(console, f"note: not used: {names}")
    if report.own_text_warning is not None:
        _line(console, f"note: {report.own_text_warning}")
    if tally.num_packs:
        _line(
            console,
            f"note: {counted(tally.num_packs, 'sample')} packed when written: train with --packing",
        )
    _print_verdict(report, console)


def _line(console: Console, text: str, style: str = "") -> None:
    """Print a line without wrapping or mark-up, so that it can be copied and searched."""
    console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)


def _print_datasets(report: DataReport, console: Console) -> None:
    tally = report.tally
    looked = "every sample" if report.full else "a choice from every shard"
    rate = tally.num_looked_at / max(report.seconds, 1e-9)
    samples = counted(tally.num_looked_at, "sample")
    _line(console, f"looked at {samples} ({looked}) in {report.seconds:.1f} s, {rate:.0f} samples/s")
    table = Table(box=None, pad_edge=False)
    table.add_column("dataset", overflow="fold")
    for name in ("share", "shards", "samples", "samples/shard", "looked at", "left out", "tokens/sample"):
        table.add_column(name, justify="right")
    for data in tally.datasets:
        table.add_row(
            data.path,
            data.share,
            str(data.num_shards),
            str(data.num_samples),
            f"{data.num_samples / max(1, data.num_shards):.0f}",
            str(data.num_seen),
            str(data.num_left_out),
            f"{data.num_tokens / max(1, data.num_used):.0f}",
        )
    console.print(table)


def _print_lengths(report: DataReport, console: Console) -> None:
    tally = report.tally
    if not tally.lengths:
        return
    # Lengths as quantiles and as bars, which show several kinds of samples.
    quantiles = "  ".join(f"{name} {value}" for name, value in report.quantiles().items())
    _line(console, f"\ntokens per sample, media included: {quantiles}")
    ranges = bins(tally.lengths, NUM_BINS)
    largest = max(count for _, _, count in ranges)
    width = len(str(ranges[-1][1]))
    for first, last, count in ranges:
        bar = "█" * -(-count * BAR // largest) + " " if count else ""
        _line(console, f"  {first:>{width}} to {last:>{width}} {bar}{count}")
    # Only the kinds of media that the data has.
    if any(tally.patches):
        quantiles = "  ".join(f"{name} {value}" for name, value in report.quantiles_of_patches().items())
        _line(console, f"{report.unit} per sample (data.max_media_tokens): {quantiles}")
    if any(tally.images) or not any(tally.audios):
        _line(console, f"images per sample: {_listed(tally.images) or 'none could be used'}")
    if tally.frames:
        _line(console, f"videos per sample: {_listed(tally.videos)}")
        _line(console, f"frames per video: {_listed(tally.frames)}")
    if any(tally.audios):
        _line(console, f"audio clips per sample: {_listed(tally.audios)}")
    # What packing and an epoch make of these lengths.
    _print_fill(report, console)
    epoch = report.epoch()
    if epoch is None:
        _line(console, "an epoch: none, the blend draws by weight")
    else:
        about = "" if report.full else "about "
        _line(console, f"an epoch: {about}" + _epoch_in_words(epoch))
    _line(console, "")


def _print_fill(report: DataReport, console: Console) -> None:
    if report.fill is None or report.samples_per_pack is None:
        return
    budget, num_samples = report.max_media_tokens, report.num_samples
    if report.samples_per_pack > num_samples:
        said = f"with --packing, one holds all {counted(num_samples, 'sample')}, and training repeats them"
    else:
        said = f"{report.fill:.1%} full with --packing, about {report.samples_per_pack:.1f} samples each"
    limit = f" and --max-media-tokens {budget}" if budget is not None else ""
    limit += f", lengths rounded up to multiples of {report.sample_multiple}" if report.sample_multiple > 1 else ""
    _line(console, f"packs of --seq-length {report.seq_length}{limit}: {said}")


def _listed(counts: Counter[int]) -> str:
    return ", ".join(f"{value}: {count}" for value, count in sorted(counts.items()))


def _epoch_in_words(epoch: dict[str, int]) -> str:
    """Return an epoch's counts as text. Videos and audio clips are only mentioned where there are some."""
    said = {name: count for name, count in epoch.items() if count or name not in ("videos", "frames", "audios")}
    words = {name: "audio clip" if name == "audios" else name.removesuffix("s") for name in said}
    return ", ".join(counted(count, words[name]) for name, count in said.items())


def _print_group(group: Group, console: Console) -> None:
    style = "red" if group.level == "stop" else "yellow" if group.level == "left out" else ""
    note = f"note, {group.count} sample{'s' if group.count > 1 else ''}"
    head = f"{group.count} {LEVELS[group.level]}" if group.level in LEVELS else note
    _line(console, f"{head}: {group.reason}", style=style)
    for path, shard, key in group.examples:
        _line(console, f"    {path}: shard {shard}, sample {key}")
    if group.count > len(group.examples):
        _line(console, f"    and {group.count - len(group.examples)} more")


def _print_verdict(report: DataReport, console: Console) -> None:
    against = report.reasons_not_to_train
    if against:
        _line(console, f"do not train: {'; '.join(against)}", style="bold red")
        return
    tally = report.tally
    skipped = (
        f"{tally.num_left_out} of {counted(tally.num_seen, 'sample')} would be left out"
        if tally.num_left_out
        else "no sample would be left out"
    )
    if report.has_pairs:
        _line(console, f"preference pairs: {skipped}; {NO_TRAINING_ON_PAIRS}", style="bold green")
    else:
        _line(console, f"train: {skipped}", style="bold green")
