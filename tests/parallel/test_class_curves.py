"""Classes with packed patches train as transformers' own class with torch's AdamW, step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.samples import Conversation
from tests.helpers.class_checks import batch_of, hf_model
from tests.helpers.tiny_idefics2 import make_hf_idefics2
from tests.helpers.tiny_qwen import KINDS, make_hf_qwen
from tests.helpers.world import run_world
from tests.parallel import class_curve_checks
from tests.unit.models import test_idefics2, test_qwen

ONE, TWICE_TWO = (1, 1, 1), (2, 2, 1)
LONG = ((1, 2, 1), (2, 1, 1), (2, 1, 2))
"""tp, pp, dp. Each of these trains a third of the models."""
FIRST_STEPS = 6
"""How many of the 20 steps that one process trains are trained at other layouts."""
Curve = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Trained:
    """A tiny model and how it is trained."""

    kind: str
    num_steps: int = 20
    chunk: int | None = 1
    """Layers of each part of an interleaved pipeline; None: not interleaved."""
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, folder: Path) -> None:
        """Write its folder."""
        if self.kind in KINDS:
            make_hf_qwen(folder, self.kind, **self.options)
        else:
            make_hf_idefics2(folder)

    @property
    def module(self) -> Any:
        """Has conversations with images, videos where there can be any, and neither; and a processor's inputs."""
        return test_qwen if self.kind in KINDS else test_idefics2

    def steps(self) -> list[list[Conversation]]:
        """Return what each step trains on: two conversations, others in the next step."""
        given: Sequence[Conversation] = self.module.CONVERSATIONS
        return [[given[i % len(given)], given[(i + 1) % len(given)]] for i in range(self.num_steps)]


TRAINED = {
    "qwen2_vl": Trained("qwen2_vl"),
    "qwen2_5_vl": Trained("qwen2_5_vl"),
    # Features of the tower are added after its first two layers, which must be on the first stage.
    "qwen3_vl": Trained("qwen3_vl", chunk=None),
    "qwen3_5": Trained("qwen3_5", num_steps=6),
    "idefics2": Trained("idefics2"),
    "qwen2_5_vl, tied": Trained("qwen2_5_vl", num_steps=6, options={"tie": True}),
    "qwen3_vl, tied": Trained(
        "qwen3_vl", num_steps=6, chunk=2, options={"tie": True, "text_overrides": {"num_hidden_layers": 8}}
    ),
}


CELLS = [(name, layout) for name in TRAINED for layout in (ONE, TWICE_TWO)]
LONG_CELLS = [(name, LONG[i % len(LONG)]) for i, name in enumerate(TRAINED)]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The arguments of every layout's world: folders, checkpoints and steps."""
    root = tmp_path_factory.mktemp("curves")
    cases = {}
    for name, trained in TRAINED.items():
        trained.make(root / name)
        import_hf(root / name, root / f"{name}-megatron")
        cases[name] = {
            "hf": str(root / name),
            "checkpoint": str(root / f"{name}-megatron"),
            "steps": trained.steps(),
            "chunk": trained.chunk,
        }
    return {"cases": cases, "save_dir": str(root / "runs")}


@pytest.fixture(scope="module")
def curve_of(material: dict[str, Any]) -> Callable[..., Curve]:
    """Returns every model's curve at a layout, from rank 0 of a world that is started once."""

    @functools.cache
    def train(tp: int, pp: int, dp: int) -> Curve:
        steps = max(x.num_steps for x in TRAINED.values()) if (tp, pp, dp) == ONE else FIRST_STEPS
        names = {name for name, layout in (*CELLS, *LONG_CELLS) if layout == (tp, pp, dp)}
        given = material | {"cases": {name: case for name, case in material["cases"].items() if name in names}}
        found: Curve = run_world(tp * pp * dp, class_curve_checks.train, tp=tp, pp=pp, most_steps=steps, **given)[0]
        return found

    return train


@pytest.fixture(scope="module")
def expected_of(material: dict[str, Any], curve_of: Callable[..., Curve]) -> Callable[[str], Any]:
    """Returns a model's losses and gradient norms of plain transformers."""
    return functools.cache(
        lambda name: their_curve(Path(material["cases"][name]["hf"]), TRAINED[name], curve_of(*ONE)[name]["lr"])
    )


def layouts_of(cells: list[tuple[str, tuple[int, int, int]]], **options: Any) -> list[Any]:
    """Return cells with ids that say what they are."""
    return [pytest.param(name, layout, id=f"{name}-{layout}", **options) for name, layout in cells]


@pytest.mark.parametrize(
    ("name", "layout"),
    layouts_of(CELLS) + layouts_of([x for x in LONG_CELLS if x[1][2] == 1], marks=pytest.mark.long),
)
def test_steps_are_those_of_transformers_and_adamw(
    curve_of: Callable[..., Curve], expected_of: Callable[[str], Any], name: str, layout: tuple[int, int, int]
) -> None:
    losses, norms = expected_of(name)
    ours = curve_of(*layout)[name]
    if layout != ONE:
        losses, norms = losses[:FIRST_STEPS], norms[:FIRST_STEPS]
    assert ours["loss"] == pytest.approx(losses, rel=1e-5)
    assert ours["grad_norm"][0] == pytest.approx(norms[0], rel=1e-5)
    assert ours["grad_norm"] == pytest.approx(norms, rel=1e-3)


@pytest.mark.parametrize("way", ["options", "padded"])
@pytest.mark.parametrize(
    ("name", "layout"),
    layouts_of([x for x in CELLS if x[1] != ONE]) + layouts_of(LONG_CELLS, marks=pytest.mark.long),
)
def test_recomputed_interleaved_sequence_and_data_parallel(
    curve_of: Callable[..., Curve], name: str, way: str, layout: tuple[int, int, int]
) -> None:
    """Packed and everything recomputed, or padded and parts recomputed: the losses of one process, packed."""
    expected, found = curve_of(*ONE)[f"{name}, options"], curve_of(*layout)[f"{name}, {way}"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def their_curve(folder: Path, trained: Trained, rates: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of plain transformers on the same conversations, each by itself."""
    model, assets = hf_model(folder).train(), load_assets(folder)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    losses, norms = [], []
    for rate, conversations in zip(rates, trained.steps(), strict=True):
        padded = batch_of(assets, conversations, packed=False)
        total: Tensor = torch.zeros(())
        for row, conversation in enumerate(conversations):
            logits = model(**trained.module.theirs_of(folder, conversation)).logits[0]
            mask, labels = padded.loss_mask[row, : len(logits)], padded.labels[row, : len(logits)]
            total = total + (F.cross_entropy(logits, labels, reduction="none") * mask).sum()
        loss = total / padded.loss_mask.sum()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms
