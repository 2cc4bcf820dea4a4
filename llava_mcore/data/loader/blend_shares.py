"""The share of each dataset in a blend: its weight, how that changes, and how often it may be read.

Beside energon's `weight` or `repetitions`, an entry of a blend may say in its `subflavors`

    weight_factor: {iterations: [[0, 1.0], [5000, 0.2]]}    # or tokens: its weight is multiplied by this over time
    max_epochs: 3                                           # it is left out afterwards
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from llava_mcore.config.sections.data import BlendWeights
from llava_mcore.data.loader.datasets import MAX_EPOCHS, Dataset
from llava_mcore.data.order.stream_order import Schedule, Share, WeightPoint, check_shares
from llava_mcore.errors import DataError, problems

FACTOR = "weight_factor"
UNITS = ("iterations", "tokens")
MANIFEST = "manifest.json"


def shares_of(datasets: Sequence[Dataset], weights: BlendWeights) -> list[Share]:
    """Return the share of each dataset.

    Args:
        weights: what the weights of the blend count, samples or tokens.

    Raises:
        DataError: everything that is wrong with the weights.
    """
    result, errors = [], []
    for dataset in datasets:
        try:
            result.append(_share(dataset, weights))
        except DataError as error:
            errors.append(str(error))
    if errors:
        raise DataError(problems("the weights of the blend cannot be read", errors))
    check_shares(result)
    return result


def _share(dataset: Dataset, weights: BlendWeights) -> Share:
    weight = dataset.weight if weights == "samples" else dataset.weight / _tokens_per_sample(dataset)
    points, unit = _factor(dataset.path, dataset.subflavors)
    max_epochs = dataset.subflavors.get(MAX_EPOCHS)
    if max_epochs is not None and not _is_number(max_epochs):
        raise DataError(f"{dataset.path}: {MAX_EPOCHS} must be a number, found {max_epochs!r}")
    schedule = Schedule(tuple(WeightPoint(at, weight * factor) for at, factor in points), unit)
    return Share(dataset.path, dataset.num_samples, schedule, None if max_epochs is None else float(max_epochs))


def _factor(path: str, subflavors: Mapping[str, Any]) -> tuple[list[tuple[float, float]], Any]:
    """Return the points of a dataset's factor, and what they count."""
    value = subflavors.get(FACTOR)
    if value is None:
        return [(0.0, 1.0)], UNITS[0]
    form = f"{path}: {FACTOR} must be {{iterations: [[0, 1.0], [5000, 0.2]]}} or the same with tokens, found {value!r}"
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in UNITS:
        raise DataError(form)
    ((unit, points),) = value.items()
    if not isinstance(points, list) or not points:
        raise DataError(form)
    if not all(isinstance(point, list) and len(point) == 2 and all(map(_is_number, point)) for point in points):
        raise DataError(form)
    return [(float(at), float(factor)) for at, factor in points], unit


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _tokens_per_sample(dataset: Dataset) -> float:
    """Return the mean number of tokens of a sample, which `prepare` has counted."""
    file = Path(dataset.path) / MANIFEST
    advice = f"prepare it with --tokenizer-load-dir, or use data.blend_weights={get_args(BlendWeights)[0]}"
    try:
        totals = json.loads(file.read_bytes())["totals"]
        num_tokens, num_samples = totals["tokens"]["total"], totals["entries"]
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}), so its tokens are not known; {advice}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} does not have the number of tokens ({error!r}); {advice}") from error
    if not num_tokens or not num_samples:
        raise DataError(f"{file}: tokens were not counted; {advice}")
    return float(num_tokens / num_samples)
