"""Sizes of files and memory as text, for messages."""

from __future__ import annotations

UNITS = ("bytes", "KB", "MB", "GB", "TB")
"""Each is 1,000 of the one before."""
_ROUNDED_UP = 999.5


def size_text(num_bytes: float) -> str:
    """Return a size in the unit that fits, with three digits: "95.2 GB", "1.30 MB", "12 bytes"."""
    value, unit = float(num_bytes), 0
    while value >= _ROUNDED_UP and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    decimals = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{decimals}f} {UNITS[unit]}"
