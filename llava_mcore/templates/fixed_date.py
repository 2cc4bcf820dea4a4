"""A fixed date for chat templates; otherwise tokens would change from day to day.

transformers gives templates a function `strftime_now`, which callers cannot replace since 5.22.2. A macro in the
template overrides it in every version.
"""

from __future__ import annotations

import string
from datetime import datetime

TODAY = datetime(2024, 7, 26)
"""The date that Llama 3's own template uses without a clock."""

_PERCENT = "\0"
_DIRECTIVES = [flag + letter for letter in string.ascii_letters for flag in ("%", "%-")]
VARIABLES = {
    "llava_mcore_date": [
        ("%%", _PERCENT),
        *((directive, TODAY.strftime(directive)) for directive in _DIRECTIVES),
        (_PERCENT, "%"),
    ]
}
"""Variables with which a template from `with_fixed_date` has to be rendered: the texts of strftime's directives."""

# Blocks in transformers' templates also take the line break after them, so the template still starts on its own line.
_MACRO = (
    "{% macro strftime_now(format) %}{% set date = namespace(text=format) %}"
    "{% for directive, text in llava_mcore_date %}{% set date.text = date.text.replace(directive, text) %}{% endfor %}"
    "{{ date.text }}{% endmacro %}\n"
)


def asks_for_date(template: str) -> bool:
    """Return whether a template's text depends on the date."""
    return "strftime_now" in template


def with_fixed_date(template: str) -> str:
    """Return the template with TODAY as its date; render it with VARIABLES."""
    return _MACRO + template if asks_for_date(template) else template
