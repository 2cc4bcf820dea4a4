"""A photograph that scikit-learn brings along."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.find_spec("sklearn")
assert _spec is not None and _spec.origin is not None
CHINA = Path(_spec.origin).parent / "datasets" / "images" / "china.jpg"
