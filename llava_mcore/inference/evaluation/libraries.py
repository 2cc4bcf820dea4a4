"""The packages that the metrics of answers need."""

from __future__ import annotations

import importlib.util

from llava_mcore.errors import ConfigError
from llava_mcore.inference.evaluation.languages import NO_LIBRARIES

NAMES = ("pycocoevalcap", "rapidfuzz", "rouge_score", "sacrebleu")


def require_libraries() -> None:
    """Raise ConfigError if one is not installed."""
    missing = [name for name in NAMES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{NO_LIBRARIES} (missing: {', '.join(missing)})")
