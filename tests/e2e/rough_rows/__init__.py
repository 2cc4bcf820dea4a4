"""The table of rough trials, a file for each part of the review."""

from __future__ import annotations

from tests.e2e.rough_rows import console, contents, folders, servers
from tests.helpers.rough import Trial

TRIALS: list[Trial] = [*folders.TRIALS, *contents.TRIALS, *console.TRIALS, *servers.TRIALS]
