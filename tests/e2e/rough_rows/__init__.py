"""The table of rough trials, a file for each group."""

from __future__ import annotations

from tests.e2e.rough_rows import console, contents, folders, numbers, others, security, servers
from tests.helpers.rough import Trial

PARTS = (folders, contents, console, servers, numbers, security, others)
TRIALS: list[Trial] = [trial for part in PARTS for trial in part.TRIALS]
