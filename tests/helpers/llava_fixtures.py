"""Fixtures of a tiny LLaVA folder; a module takes them by `pytest_plugins = ("tests.helpers.llava_fixtures",)`."""

from __future__ import annotations

from pathlib import Path

import pytest

from llava_mcore.data.encode.assets import Assets, load_assets
from tests.helpers.tiny_hf import make_hf_llava


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA folder."""
    folder = tmp_path_factory.mktemp("hf")
    make_hf_llava(folder)
    return folder


@pytest.fixture(scope="module")
def assets(hf: Path) -> Assets:
    """Its parts that turn samples into model inputs."""
    return load_assets(hf)
