"""Names of source formats. Light imports, because the command line's help lists them."""

from __future__ import annotations

from typing import Literal, get_args

Format = Literal["auto", "llava", "sharegpt", "openai", "parquet", "huggingface", "vqa"]
FORMATS: tuple[Format, ...] = get_args(Format)
