"""Fixtures that build from tiny parts; a module takes them by `pytest_plugins = ("tests.helpers.build_fixtures",)`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.build.folder import build_llava
from llava_mcore.build.options import BuildOptions
from tests.helpers.build_parts import save_text, save_vision
from tests.helpers.tiny_hf import TEXTS, TEXTS_WITH_EXPERTS

ALL_TEXTS = {**TEXTS, **TEXTS_WITH_EXPERTS}


@pytest.fixture(scope="session")
def tiny_parts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A source folder by its contents, written once: tiny_parts("clip"), tiny_parts("qwen2", tie=True)…"""
    root, made = tmp_path_factory.mktemp("parts"), {}

    def get(kind: str, **how: Any) -> Path:
        key = (kind, *sorted(how.items()))
        if key not in made:
            folder = root / str(len(made))
            made[key] = save_text(folder, kind, **how) if kind in ALL_TEXTS else save_vision(folder, kind, **how)
        return made[key]

    return get


@pytest.fixture
def build_tiny(tiny_parts: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Build into a fresh folder, from tiny parts unless others are given."""
    numbers = itertools.count()

    def make(text: Path | None = None, vision: Path | None = None, **options: Any) -> Path:
        out = tmp_path / f"built{next(numbers)}"
        text, vision = text or tiny_parts("llama"), vision or tiny_parts("clip")
        chosen = BuildOptions(save_dir=out, text_model=str(text), vision_model=str(vision), **options)
        build_llava(chosen, say=lambda line: None)
        return out

    return make
