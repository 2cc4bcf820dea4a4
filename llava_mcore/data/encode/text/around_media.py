"""Applies what a processor rewrites around pictures to a rendered text and the spans in it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llava_mcore.data.encode.text.spans import Span
from llava_mcore.media.media import AroundMedia


def rewritten(text: str, spans: Sequence[Span], around: AroundMedia) -> tuple[str, list[Span]]:
    """Return the text after all rules, and where the spans are in it."""
    bounds = [bound for span in spans for bound in span]
    for pattern, replacement in around.rules:
        ends = [(match.end(), len(replacement) - len(match[0])) for match in re.finditer(pattern, text)]
        bounds = [bound + sum(longer for end, longer in ends if end <= bound) for bound in bounds]
        text = re.sub(pattern, replacement.replace("\\", r"\\"), text)
    return text, list(zip(bounds[::2], bounds[1::2], strict=True))
