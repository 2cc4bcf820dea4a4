"""Sizes in messages have the unit that fits."""

from __future__ import annotations

import pytest

from llava_mcore.files.sizes import size_text

SIZES = {
    0: "0 bytes",
    999: "999 bytes",
    1000: "1.00 KB",
    131_072: "131 KB",
    999_499: "999 KB",
    999_500: "1.00 MB",
    1_304_000: "1.30 MB",
    68_249_999: "68.2 MB",
    9_994_000_000: "9.99 GB",
    9_996_000_000: "10.0 GB",
    95_234_000_000: "95.2 GB",
    2_500_000_000_000: "2.50 TB",
    15_000_000_000_000_000: "15,000 TB",
}


@pytest.mark.parametrize(("num_bytes", "text"), SIZES.items())
def test_the_unit_fits(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
