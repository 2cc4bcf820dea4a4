"""A packed sample has the loss that it has alone, through the whole pipeline."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_classes import MAKERS
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import packing_checks

NUM_SAMPLES = 24


def picture(index: int) -> bytes:
    """A noise of one of four shapes."""
    buffer = BytesIO()
    width, height = ((56, 56), (168, 50), (40, 130), (300, 20))[index % 4]
    Image.effect_noise((width, height), 90).convert("RGB").save(buffer, "JPEG")
    return buffer.getvalue()


def losses_by_sample(ranks: list[dict[str, dict[str, Any]]], kind: str) -> dict[str, float]:
    """Sum the losses of every sample's trained tokens; a sample that is met again must have them again."""
    places = next(rank[kind]["places"] for rank in ranks if rank[kind]["places"])
    tensors = next(rank[kind]["losses"] for rank in reversed(ranks) if rank[kind]["losses"])
    found: dict[str, float] = {}
    for conversations, losses in zip(places, tensors, strict=True):
        for key, row, begin, end in conversations:
            loss = losses[row, begin:end].sum().item()
            assert found.setdefault(key, loss) == pytest.approx(loss, rel=1e-5)
    return found


@pytest.fixture(scope="module", params=["llava", "internvl", "idefics3"])
def material(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint of each class, and samples with images of several sizes."""
    root: Path = tmp_path_factory.mktemp("packing")
    MAKERS.get(request.param, make_hf_llava)(root / "hf")
    import_hf(root / "hf", root / "megatron")
    replace = {i: {"txt": "It is " + "so very " * (i % 7) + f"{i}.", "jpg": picture(i)} for i in range(NUM_SAMPLES)}
    make_dataset(root / "data", num_samples=NUM_SAMPLES, replace=replace)
    return {"checkpoint": str(root / "megatron"), "data": str(root / "data")}


def test_packed_samples_have_the_losses_of_padded_ones(material: dict[str, str]) -> None:
    found = {}
    for tp, pp in ((1, 1), (2, 2)):
        ranks = run_world(tp * pp, packing_checks.sample_losses, tp=tp, pp=pp, **material)
        for kind in ("padded", "packed"):
            found[tp, pp, kind] = losses_by_sample(ranks, kind)
    reference = found[1, 1, "padded"]
    assert len(reference) == NUM_SAMPLES and min(reference.values()) > 0
    for losses in found.values():
        assert losses == pytest.approx(reference, rel=1e-5)
