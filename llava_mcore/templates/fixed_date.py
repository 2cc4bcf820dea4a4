"""The date that chat templates get: always the same one, as tokens would otherwise change from day to day.

transformers gives templates a function `strftime_now`, and since 5.22.2 it takes none from its callers; a macro of
the template's own comes before it at any version.
"""

from __future__ import annotations

import string
from datetime import datetime

TODAY = datetime(2024, 7, 26)
"""What Llama 3's own template says without a clock."""

_PERCENT = "\0"
_DIRECTIVES = [flag + letter for letter in string.ascii_letters for flag in ("%", "%-")]
VARIABLES = {
    "llava_mcore_date": [
        ("%%", _PERCENT),
        *((directive, TODAY.strftime(directive)) for directive in _DIRECTIVES),
        (_PERCENT, "%"),
    ]
}
"""What a template from `with_fixed_date` needs to be rendered: the texts of strftime's directives."""

# Blocks in transformers' templates also take the line break after them, so the template begins a line as before.
_MACRO = (
    "{% macro strftime_now(format) %}{% set date = namespace(text=format) %}"
    "{% for directive, text in llava_mcore_date %}{% set date.text = date.text.replace(directive, text) %}{% endfor %}"
    "{{ date.text }}{% endmacro %}\n"
)


def asks_for_date(template: str) -> bool:
    """Tell whether a template's text depends on the day."""
    return "strftime_now" in template


def with_fixed_date(template: str) -> str:
    """Return the template with a clock that stands at TODAY; render it with VARIABLES."""
    return _MACRO + template if asks_for_date(template) else template
