"""docs/extend/class.md, followed literally: a class out of tree, against its model in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from llava_mcore.config.model_classes import MODEL_CLASSES, ModelClass
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.models.architectures.registry import ARCHITECTURES
from llava_mcore.parallel.groups import single_process
from tests.helpers.extending import assert_same_logits, train_a_little
from tests.helpers.pages import blocks
from tests.helpers.tiny_hf import make_hf_llava, randomise


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of docs/extend/class.md works as its blocks stand."""
    toy, *lines = blocks("class.md")
    for table in (ARCHITECTURES, MODEL_CLASSES):
        monkeypatch.setitem(table, "toy", None)  # taken out at the end
    names = toy.run(
        {"__name__": "toy", "ARCHITECTURES": ARCHITECTURES, "MODEL_CLASSES": MODEL_CLASSES, "ModelClass": ModelClass}
    )
    for line in lines:
        line.run(names)
    assert MODEL_CLASSES["toy"].name == ARCHITECTURES["toy"].model_class.__name__

    values = make_hf_llava(tmp_path / "hf").config.to_dict()
    model = names["ToyForConditionalGeneration"]._from_config(
        names["ToyConfig"].from_dict(values | {"model_type": "toy"})
    )
    randomise(model.eval(), 1)
    model.config.save_pretrained(tmp_path / "hf")  # the model's own method renames tensors as for the class above it
    save_file(model.state_dict(), tmp_path / "hf" / "model.safetensors")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    with single_process() as groups:
        assert_same_logits(groups, tmp_path / "megatron", model)
        losses = train_a_little(groups, tmp_path / "megatron", tmp_path / "save")
    assert losses[-1] < losses[0]
