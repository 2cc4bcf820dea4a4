"""Options that save memory or time change no number: losses and gradients are those of the plain run of the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llava_mcore.apps.import_hf import import_hf
from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world

FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {"vision": "siglip"}, "qwen2": {"tie": True}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("options")
    for text, more in FAMILIES.items():
        make_hf_llava(root / f"hf-{text}", text=text, **more)
        import_hf(root / f"hf-{text}", root / text)
    return {text: str(root / text) for text in FAMILIES}


def test_options_change_no_number(checkpoints: dict[str, str], tmp_path: Path) -> None:
    arguments = {"tp": 2, "pp": 2, "checkpoints": checkpoints, "save_dir": str(tmp_path)}
    ranks = run_world(4, "tests.parallel.option_checks:curves", **arguments)
    assert all(rank == ranks[0] for rank in ranks), "ranks disagree about the loss"
    runs = ranks[0]
    for name, run in runs.items():
        plain = runs[name.partition(" + ")[0]]
        if "+ recompute" in name:
            assert run == plain, name
        assert run["loss"] == pytest.approx(plain["loss"], rel=1e-5), name
        assert run["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), name
        assert run["grad_norm"][0] == pytest.approx(plain["grad_norm"][0], rel=1e-5), name


def test_a_checkpoint_does_not_know_how_the_layers_were_divided(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """Saved from an interleaved pipeline, continued with uneven stages."""
    hf = str(hf_folder(iteration_folder(Path(checkpoints["llama"]), 0)))
    arguments = {"checkpoint": checkpoints["llama"], "save_dir": str(tmp_path), "hf": hf}
    ranks = run_world(2, "tests.parallel.option_checks:resume_elsewhere", **arguments)
    assert ranks[0] == ranks[1] and ranks[0].keys() == {"plain", "distributed"}
    for broken, unbroken in ranks[0].values():
        assert broken == pytest.approx(unbroken, rel=1e-5)
