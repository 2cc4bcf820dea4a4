"""Which passes run as graphs, with plain calls in their place. GPUs: tests/gpu/test_generate.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from torch import Tensor

from benchmarks.generate import make_prompt
from llava_mcore.inference.generation import stages
from llava_mcore.inference.generation.generate import generate
from llava_mcore.inference.generation.graphs import CapturedPass, PassGraphs
from llava_mcore.inference.generation.settings import TokenSampling, read_settings
from llava_mcore.media.batch_fields import PIXEL_VALUES
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.configs import ModelOptions
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import join_alone
from llava_mcore.parallel.random import seed_everything
from tests.helpers.tiny_hf import make_hf_llava

NUM_NEW = 6
NUM_TEXT = (9, 11, 40, 12, 300, 10, 41, 301, 302, 9, 400, 400)
"""Tokens of prompts, beside their image: three lengths with padding, the last of which needs larger caches, and one
that is too long for a graph."""


class Graph:
    """Stands for a CUDA graph: computes again from the same tensors into the same."""

    replays: ClassVar[list[tuple[torch.Size, ...]]] = []
    """The shapes of each replay."""

    def __init__(self, compute: Any, inputs: tuple[Tensor, ...]) -> None:
        self.compute, self.inputs, self.output = compute, inputs, compute(*inputs).clone()

    def replay(self) -> None:
        Graph.replays.append(tuple(x.shape for x in self.inputs))
        self.output.copy_(self.compute(*self.inputs))

    def reset(self) -> None:
        self.output.fill_(float("nan"))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, ...]]:
    """Emulate graphs; return the shapes that are captured."""
    shapes: list[tuple[torch.Size, ...]] = []

    def capture(self: PassGraphs, inputs: tuple[Tensor, ...]) -> CapturedPass:
        inputs = tuple(x.clone() for x in inputs)
        shapes.append(tuple(x.shape for x in inputs))
        graph: Any = Graph(self._compute, inputs)
        return CapturedPass(graph, inputs, graph.output)

    monkeypatch.setattr(PassGraphs, "_captured", capture)
    monkeypatch.setattr(stages, "can_capture", lambda models, device: True)
    monkeypatch.setattr(stages, "PROMPT_MULTIPLE", 32)
    monkeypatch.setattr(stages, "MOST_TOKENS", 320)
    monkeypatch.setattr(Graph, "replays", [])
    return shapes


@pytest.mark.parametrize("num_rows", [1, 3])
def test_answers_are_the_same(tmp_path: Path, captured: list[tuple[torch.Size, ...]], num_rows: int) -> None:
    make_hf_llava(tmp_path)
    hf, groups = load_hf_config(tmp_path), join_alone()
    seed_everything(0)
    model = VisionLanguageModel(hf, ModelOptions(params_dtype=torch.float32, on_cpu=True)).eval()
    settings = read_settings(tmp_path, hf, None, max_new_tokens=NUM_NEW, sampling=TokenSampling())
    settings = dataclasses.replace(settings, end_ids=frozenset())
    prompts = [make_prompt(hf, seed, num_text) for seed, num_text in enumerate(NUM_TEXT)]
    fields = architecture_of(hf).fields

    def answers(*, graphs: bool) -> dict[int, list[int]]:
        found = generate([model], groups, iter(prompts), settings, fields, num_rows=num_rows, graphs=graphs)
        return {answer.index: answer.tokens for answer in found}

    expected = answers(graphs=False)
    assert answers(graphs=True) == expected and len(expected) == len(prompts)
    tiles = (prompts[0].batch.media[PIXEL_VALUES].shape,)
    assert captured.count(tiles) == 1 and Graph.replays.count(tiles) == len(prompts) - 1, "first calls have no graph"
    lengths = [shapes[0][0] for shapes in captured if len(shapes) == 2]
    assert [n for n in lengths if n > num_rows] == [32, 32, 64, 320], "the caches have grown after the first"
    replayed = [shapes[0][0] for shapes in Graph.replays if len(shapes) == 2]
    assert sum(n > num_rows for n in replayed) == 7
    assert lengths.count(num_rows) == 2, "tokens have another graph when the caches have grown"
    assert replayed.count(num_rows) > 2 * NUM_NEW
    assert "forward" not in vars(model.vision_model)
