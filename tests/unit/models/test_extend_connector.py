"""docs/extend/connector.md, followed literally: a connector out of tree, against the same one in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.models.architectures.llava import Llava
from llava_mcore.models.architectures.registry import ARCHITECTURES
from llava_mcore.parallel.groups import single_process
from tests.helpers.extending import assert_same_logits, train_a_little
from tests.helpers.pages import blocks
from tests.helpers.tiny_hf import make_hf_llava, randomise


class HfAverage(nn.Module):
    """The connector as a class of transformers would have it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden)

    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = self.linear(features.unflatten(1, (-1, 2)).mean(2))
        return projected


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector of docs/extend/connector.md computes what its Hugging Face twin does."""
    connector, architecture = blocks("connector.md")
    names = architecture.run(connector.run({}))
    own = type("WithAverage", (Llava,), {"connector": names["connector"]})
    monkeypatch.setitem(ARCHITECTURES, "llava", own())

    model = make_hf_llava(tmp_path / "hf")
    config = model.config
    model.model.multi_modal_projector = HfAverage(config.vision_config.hidden_size, config.text_config.hidden_size)
    randomise(model, 1)
    model.save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    with single_process() as groups:
        assert_same_logits(groups, tmp_path / "megatron", model)
        losses = train_a_little(groups, tmp_path / "megatron", tmp_path / "save")
    assert losses[-1] < losses[0]
