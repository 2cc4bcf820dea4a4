"""`inspect` says what folders hold: counts, what is trained, what is ignored, layout and iteration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llava_mcore.checkpoint import layout
from llava_mcore.cli import inspect_folder
from llava_mcore.config.load import load_run_config, save_run_config
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.inventory import InventoryRow, of_hf, of_megatron
from tests.helpers.tiny_hf import make_hf_llava


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("inspect")
    make_hf_llava(root / "hf", vision="siglip", tie=True, dtype=torch.bfloat16)
    import_hf(root / "hf", root / "m", tensor_parallel=2, pipeline_parallel=2)
    return root / "hf", root / "m"


def parameters(rows: list[InventoryRow], state: str, part: str | None = None) -> int:
    return sum(row.parameters for row in rows if row.state == state and part in (None, row.part))


def test_every_tensor_of_a_hugging_face_folder_is_counted(folders: tuple[Path, Path]) -> None:
    weights = load_file(folders[0] / "model.safetensors")
    rows = of_hf(folders[0]).rows
    assert sum(row.count for row in rows) == len(weights)
    assert sum(row.parameters for row in rows) == sum(x.numel() for x in weights.values())
    assert sum(row.num_bytes for row in rows) == sum(x.nbytes for x in weights.values())
    gate = next(row for row in rows if "gate_proj" in row.name)
    assert gate.name == "language_model.model.layers.{0-3}.mlp.gate_proj.weight"
    assert (gate.shape, gate.dtype, gate.count, gate.state) == ((128, 64), "bfloat16", 4, "trainable")
    ignored = {
        name for name in weights if any(x in name for x in ("layers.3", "post_layernorm", "head.")) and "vision" in name
    }
    assert parameters(rows, "unused") == sum(weights[name].numel() for name in ignored)


def test_a_checkpoint_holds_as_many_parameters_beside_the_padding(folders: tuple[Path, Path]) -> None:
    hf, megatron = of_hf(folders[0]), of_megatron(*layout.latest_checkpoint(folders[1]))
    padding = (512 - 401) * 64  # rows of the embedding
    assert parameters(megatron.rows, "trainable") == parameters(hf.rows, "trainable") + padding
    assert parameters(megatron.rows, "unused") == parameters(hf.rows, "unused")
    facts = "\n".join(megatron.facts)
    assert "iteration 0" in facts and f"imported from {folders[0]} for tp 2 x pp 2" in facts
    assert "tied embeddings" in facts and "siglip_vision_model, 4 layers of 64" in facts


def test_a_run_says_what_it_froze(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = import_hf(folders[0], tmp_path / "m")
    overrides = ["name=second", "stage=2", "model.freeze_language_model=true", "parallel.tensor_model_parallel_size=4"]
    save_run_config(load_run_config(None, overrides, {}), checkpoint / "run.yaml")
    inventory = of_megatron(checkpoint, 0)
    states = {row.part: row.state for row in inventory.rows if row.state != "unused"}
    assert states == {"language model": "frozen", "vision tower": "frozen", "projection": "trainable"}
    assert any("written by run second (stage 2) at tp 4 x pp 1" in line for line in inventory.facts)
    for folder in (tmp_path / "m", checkpoint, folders[0]):
        assert inspect_folder.main([str(folder)]) == 0
        said = capsys.readouterr().out
        assert "training ignores" in said and "attention-pooling head" in said and "bfloat16" in said


def test_other_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_folder.main([str(tmp_path)]) == 2
    assert "neither a Hugging Face folder (config.json) nor one of Megatron checkpoints" in capsys.readouterr().err
