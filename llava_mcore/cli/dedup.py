"""`dedup`: samples that occur twice, or that an evaluation set has too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.cli.base.entry import command_main
from llava_mcore.cli.base.shared_flags import default_workers
from llava_mcore.errors import ConfigError, DataError

if TYPE_CHECKING:
    from llava_mcore.dedup.find import DuplicateGroup
    from llava_mcore.dedup.scan import Library, ScanResult

SHOWN_REASONS = 5
NO_LIBRARIES = "dedup needs datasketch: pip install 'llava-mcore[dedup]'"


def _path(text: str) -> Path | str:
    """Return the path of a dataset: a URL stays as it is."""
    return text if "://" in text else Path(text)


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore dedup`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore dedup",
        usage="%(prog)s --data-path PATH … --out DIR [--exclude] [FLAG …]",
        allow_abbrev=False,
        description="Find samples that occur more than once in prepared data, exactly or nearly (images that were "
        "resized or recompressed, text with small changes), list them, and show them on a page. With --against, find "
        "training samples that also occur in evaluation data. With --exclude, training omits them: their names go "
        "into split.yaml, and no shard changes.",
    )
    help_of_path = "prepared data or blends, also in object stores"
    p.add_argument("--data-path", type=_path, nargs="+", required=True, metavar="PATH", help=help_of_path)
    p.add_argument("--split", default="train", help="split to read (default train)")
    help_of_against = "prepared evaluation data: find only samples that also occur in it"
    p.add_argument("--against", type=_path, nargs="+", metavar="PATH", help=help_of_against)
    p.add_argument("--against-split", default="train", help="split of the evaluation data (default train)")
    help_of_match = "what two samples must share: all images and the text (default), one image, or the text"
    p.add_argument("--match", choices=("sample", "image", "text"), default="sample", help=help_of_match)
    p.add_argument("--exact", action="store_true", help="find only samples with identical text and files")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the list, the page and the image")
    p.add_argument("--exclude", action="store_true", help="add the duplicates to `exclude` in each split.yaml")
    p.add_argument(
        "--num-workers", type=int, default=default_workers(), help="processes that read (default: all cores)"
    )
    return p


def run(args: argparse.Namespace) -> int:
    """Scan, compare and report. DataError if data cannot be opened."""
    from rich.progress import Progress

    try:
        from llava_mcore.dedup.confirm import Confirmer
        from llava_mcore.dedup.find import find_groups
        from llava_mcore.dedup.report import exclude, names_to_exclude, write_report
        from llava_mcore.dedup.scan import Library, scan
    except ModuleNotFoundError as error:
        if error.name != "datasketch":
            raise
        raise ConfigError(NO_LIBRARIES) from error

    if args.exact and args.match != "sample":
        raise DataError("--exact compares whole samples: omit --match or --exact")
    reference = Library(args.against or [], args.against_split)
    library = Library(args.data_path, args.split)
    # The evaluation set comes first, so that its samples are those that stay.
    library.datasets[:0] = reference.datasets
    with Progress(transient=True) as progress:
        reading = progress.add_task("reading", total=library.num_samples)
        scanned = scan(library, num_workers=args.num_workers, on_samples=lambda n: progress.advance(reading, n))
        comparing = progress.add_task("comparing", total=None)
        groups = find_groups(
            scanned.signatures,
            Confirmer(library.read, args.match),
            args.match,
            only_exact=args.exact,
            num_reference=sum(x.place.dataset < len(reference.datasets) for x in scanned.signatures),
            on_pair=lambda: progress.advance(comparing),
        )
    write_report(args.out, groups, library)
    names = names_to_exclude(groups, library)
    if args.exclude:
        exclude(names)
    print("\n".join(_summary(scanned, groups, library, names, args)))
    return 0


def _summary(
    scanned: ScanResult,
    groups: Sequence[DuplicateGroup],
    library: Library,
    names: dict[str, list[str]],
    args: argparse.Namespace,
) -> list[str]:
    num_exact = sum(x.exact for group in groups for x in group.duplicates)
    num_found = sum(map(len, names.values()))
    lines = [
        f"{len(scanned.signatures)} samples of {len(library.datasets)} datasets were compared",
        f"{num_found} duplicates in {len(groups)} groups: {num_exact} exact, {num_found - num_exact} near",
        *(f"  {dataset}: {len(keys)}" for dataset, keys in names.items()),
    ]
    if scanned.excluded:
        lines.append(f"{scanned.excluded} samples are excluded by split.yaml already")
    if scanned.broken:
        lines.append(f"{scanned.broken.total()} samples cannot be read and were not compared (`check` names them):")
        lines += [f"  {count}: {reason}" for reason, count in scanned.broken.most_common(SHOWN_REASONS)]
    lines.append(f"see {args.out}/duplicates.html; the list is {args.out}/duplicates.jsonl")
    if args.exclude and num_found:
        lines.append(
            "training leaves them out from now on; runs that were saved before cannot be resumed with this data"
        )
    elif num_found:
        lines.append("to leave them out of training: the same command with --exclude")
    return lines


main = command_main(parser, run)
"""Entry point; `arguments` replace those of the command line."""
