"""Which passes of layers run as graphs, with plain calls in the place of graphs. GPUs: tests/gpu."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
from megatron.core.transformer.moe import router as megatron_router
from torch import Tensor, nn

from llava_mcore.compat.megatron.graphs import DropActivations
from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_run, loader_multiple
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.errors import ConfigError
from llava_mcore.models.language.experts import ExpertLayer
from llava_mcore.parallel.groups import join_alone
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.graphs import layer_graphs, model_graphs, packs
from llava_mcore.training.graphs.layer_graphs import LayerGraphs
from llava_mcore.training.graphs.packs import TokenPacks, padded_bounds
from llava_mcore.training.optimization.data_parallel import overlaps_param_gather
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import train_step
from tests.helpers.batches import LENGTH, FullPackLoader
from tests.helpers.class_checks import batch_of
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_idefics2 import make_hf_idefics2
from tests.helpers.tiny_qwen import OWN_TOWERS, make_hf_qwen
from tests.parallel.class_curve_checks import GivenLoader
from tests.parallel.option_checks import MIXED
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config
from tests.unit.models.test_idefics2 import CONVERSATIONS as IDEFICS2_CONVERSATIONS
from tests.unit.models.test_qwen import CONVERSATIONS

LORA = {"adapter.r": 4, "adapter.projection_r": 4, "model.freeze_vision_model": True}


@pytest.mark.parametrize(
    ("bounds", "least", "expected"),
    [
        ([0, 5], 1, [0, 5]),
        ([0, 5, 9], 1, [0, 5, 9]),
        ([0, 1, 2, 3], 1, [0, 1, 2, 3, 3]),
        ([0, 1, 2, 3, 4, 5], 1, [0, 1, 2, 3, 4, 5, 5, 5, 5]),
        ([0, 1, 2, 3], 6, [0, 1, 2, 3, 3, 3, 3]),
        ([0, 1, 2, 3], 3, [0, 1, 2, 3]),
        ([0, 1, 2, 3], 2, [0, 1, 2, 3, 3]),
    ],
)
def test_empty_samples_fill_up_to_a_power_of_two(bounds: list[int], least: int, expected: list[int]) -> None:
    assert padded_bounds(torch.tensor(bounds, dtype=torch.int32), least).tolist() == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("graphs")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    return root / "megatron"


class Calls:
    """Stands for `make_graphs`: plain calls, which are counted."""

    def __init__(self) -> None:
        self.captured: list[list[tuple[int, ...]]] = []
        self.calls = self.destroyed = 0

    def __call__(
        self, parts: Sequence[nn.Module], samples: Sequence[tuple[Tensor, ...]], **_: Any
    ) -> list[Callable[..., Any]]:
        self.captured.append([tuple(x.shape[0] for x in sample) for sample in samples])
        return [Call(self, part) for part in parts]


class Call:
    """Stands for a graph."""

    def __init__(self, calls: Calls, part: nn.Module) -> None:
        self._calls, self._part = calls, part

    def __call__(self, *given: Tensor, is_first_microbatch: bool) -> Any:
        self._calls.calls += 1
        return self._part(*given)

    def reset(self) -> None:
        self._calls.destroyed += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(layer_graphs, "make_graphs", calls)
    monkeypatch.setattr(layer_graphs, "new_pool", lambda: (0, 0))
    return calls


def train(trainer: Trainer, steps: int = 4, *, loads: bool = False) -> list[tuple[Any, ...]]:
    """Return loss and gradient norm of each step; with `loads` what routers report too."""
    groups = trainer.groups
    loader = FullPackLoader(trainer.hf, micro_batch_size=2, dp_rank=0, dp_size=1, text_only=MIXED)
    found: list[tuple[Any, ...]] = []
    for _ in range(steps):
        batches, *_ = fetch_step(groups, loader, GLOBAL_BATCH // 2, SkipBudget(0.0), trainer.fields)
        parts = groups, trainer.chunks, trainer.optimizer, trainer.scheduler
        of_experts = trainer.loads if loads else None
        result = train_step(*parts, batches, GLOBAL_BATCH, trainer.graphs, loads=of_experts).result()
        found.append((result.loss, result.grad_norm, *((result.loads, result.sums) if loads else ())))
    return found


@pytest.mark.parametrize("flags", [{}, LORA], ids=["all", "lora"])
def test_segments_compute_what_layers_do(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, flags: dict[str, Any]
) -> None:
    """Also a segment's parameters are all that its layers use, adapters among them: graphs need to know them."""
    groups = join_alone()
    run = run_config(1, 1, str(checkpoint), str(tmp_path), **flags, **{"data.packing": True})
    expected = train(make_trainer(groups, run))
    monkeypatch.setattr(model_graphs, "LAYERS_PER_GRAPH", 3)
    trainer = make_trainer(groups, run)
    model = trainer.models[0].language_model
    segments, packs = model_graphs.decoder_segments(model), TokenPacks(LENGTH)
    graphs = LayerGraphs(segments, model.config, trainer.chunks[0], packs)
    used = [p for segment in graphs._segments for p in segment.parameters()]
    trained = {id(p) for name, p in model.named_parameters() if p.requires_grad and ".layers." in name}
    assert {id(p) for p in used if p.requires_grad} == trained and trained
    object.__setattr__(trainer, "graphs", [graphs])
    assert train(trainer) == expected
    # Four layers are two segments, with adapters one. The first step sees packs of two samples and of three, which
    # count as four.
    number = 1 if flags else 2  # graphs
    two, three = [(2 * LENGTH, 3, 2 * LENGTH)] * number, [(2 * LENGTH, 5, 2 * LENGTH)] * number
    assert calls.captured in ([two, three], [three, two])
    assert calls.calls == 3 * (GLOBAL_BATCH // 2) * number
    before = calls.calls
    with torch.no_grad():
        trainer.models[0].eval()
        model(torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)[None], None)
    assert calls.calls == before
    graphs.close()
    assert calls.destroyed == 2 * number
    trainer.models[0].train()
    train(trainer, 1)
    assert calls.calls == before


def test_large_activations_are_not_kept_before_a_capture() -> None:
    """Weights, indices and small tensors are."""
    layer, small, order = nn.Linear(1024, 1024), torch.arange(1024.0), torch.arange(512 * 1024).flip(0)
    x = torch.randn(512, 1024, requires_grad=True)
    with DropActivations(layer.parameters()):
        hidden = x * small
        alive = weakref.ref(hidden)
        y = layer(hidden).flatten()[order]
        del hidden
    assert alive() is None
    weight_grad, x_grad = torch.autograd.grad(y.sum(), [layer.weight, x])
    assert weight_grad.shape == layer.weight.shape
    assert torch.equal(x_grad, torch.ones_like(x) @ layer.weight * small)


PACKS = [CONVERSATIONS, CONVERSATIONS[2:], CONVERSATIONS[1:2]]
"""Several images and videos, one of each, text alone."""
IDEFICS2_PACKS = [IDEFICS2_CONVERSATIONS, IDEFICS2_CONVERSATIONS[2:], IDEFICS2_CONVERSATIONS[1:2]]
"""Several images, one, text alone."""
SEGMENTS = {"qwen3_vl": [[1], [2, 3], [4]]}
"""Layers of graphs where features are taken between layers."""


class PictureRun:
    """A run of a class whose images have any size: three packs per step."""

    def __init__(self, folder: Path, name: str) -> None:
        hf, self.packs = folder / "hf", PACKS
        if name == "idefics2":
            self.packs = IDEFICS2_PACKS
            make_hf_idefics2(hf)
        else:
            make_hf_qwen(hf, name)
        import_hf(hf, folder / "megatron")
        lengths = {"training.micro_batch_size": 1, "data.seq_length": 2000, "data.max_media_tokens": 1200}
        self.run = run_config(1, 1, str(folder / "megatron"), str(folder), **lengths)
        self._batches = [batch_of(load_assets(hf), pack, packed=True) for pack in self.packs] * 3

    def packs_of_first_step(self, *indices: int) -> None:
        """Let the first step have these packs; all steps have three."""
        self._batches[:3] = [self._batches[i] for i in indices]

    def trainer(self) -> Trainer:
        return make_trainer(join_alone(), self.run)

    def train(self, trainer: Trainer) -> list[tuple[float, float]]:
        loader, groups = GivenLoader(self._batches), trainer.groups
        found = []
        for _ in range(3):
            given, *_ = fetch_step(groups, loader, len(self.packs), SkipBudget(0.0), trainer.fields)
            parts = groups, trainer.chunks, trainer.optimizer, trainer.scheduler
            result = train_step(*parts, given, len(self.packs), trainer.graphs).result()
            found.append((result.loss, result.grad_norm))
        return found


@pytest.mark.parametrize("name", [*(x for x in OWN_TOWERS if x != "qwen3_5"), "idefics2"])  # its tower is Qwen3-VL's
def test_a_tower_with_graphs_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, name: str
) -> None:
    """With blank patches, whose windows and images see nothing else."""
    case = PictureRun(tmp_path, name)
    expected = case.train(case.trainer())
    monkeypatch.setattr(model_graphs, "SIZE_MULTIPLE", 8)
    monkeypatch.setattr(model_graphs, "TOWER_LAYERS_PER_GRAPH", 3)
    trainer = case.trainer()
    tower = trainer.models[0].vision_model
    object.__setattr__(trainer, "graphs", [model_graphs.tower_graphs(tower, trainer.chunks[0], case.run)])
    for found, wanted in zip(case.train(trainer), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)
    segments = [[layer.layer_number for layer in layers] for layers in model_graphs.tower_segments(tower)]
    assert segments == SEGMENTS.get(name, [[1, 2, 3], [4]])
    assert list(dict.fromkeys(captured[0][0] for captured in calls.captured)) == [
        1200,
        1128,
        1056,
        976,
        904,
        832,
        752,
        680,
        600,
        304,
    ]
    assert calls.calls == 2 * len(case.packs) * len(segments)
    assert [tower._filled_up(number) for number in (1, 304, 305, 1200, 1201)] == [304, 304, 600, 1200, 1280]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_late_shape_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, name: str
) -> None:
    """The first step has few images and samples: the second computes what has no graph, in tower and decoder, twice.
    Gradients are the same, also those of features that Qwen3-VL adds in the decoder."""
    case = PictureRun(tmp_path, name)
    case.packs_of_first_step(2, 2, 1)
    expected = case.train(case.trainer())
    monkeypatch.setattr(packs, "IMAGE_COUNTS", (4, 32))
    again: list[int] = []
    recompute = LayerGraphs._recomputed

    def counted(graphs: LayerGraphs, run: Callable[[Tensor], Any], hidden_states: Tensor) -> Any:
        def counted_run(x: Tensor) -> Any:
            again.append(len(x))
            return run(x)

        return recompute(graphs, counted_run, hidden_states)

    monkeypatch.setattr(LayerGraphs, "_recomputed", counted)
    trainer = case.trainer()
    model = trainer.models[0]
    segments = model_graphs.decoder_segments(model.language_model, model.num_deepstack)
    decoder = LayerGraphs(segments, model.config, trainer.chunks[0], TokenPacks(case.run.data.seq_length))
    tower = model_graphs.tower_graphs(model.vision_model, trainer.chunks[0], case.run)
    object.__setattr__(trainer, "graphs", [tower, decoder])
    for found, wanted in zip(case.train(trainer), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)
    layers = len(model.vision_model.decoder.layers), len(model.language_model.decoder.layers)
    assert len(again) == 2 * sum(layers), "one pack of the second step has more images and more samples"


def test_features_are_added_between_graphs(tmp_path: Path, calls: Calls) -> None:
    """DeepStack's, after the first layers of Qwen3-VL's language model."""
    case = PictureRun(tmp_path, "qwen3_vl")
    expected, trainer = case.train(case.trainer()), case.trainer()
    model = trainer.models[0]
    segments = list(model_graphs.decoder_segments(model.language_model, model.num_deepstack))
    assert [[layer.layer_number for layer in layers] for layers in segments] == [[1], [2], [3, 4]]
    config = model.language_model.config
    graphs = LayerGraphs(segments, config, trainer.chunks[0], TokenPacks(case.run.data.seq_length))
    object.__setattr__(trainer, "graphs", [graphs])
    assert case.train(trainer) == expected
    assert calls.calls == 2 * len(case.packs) * len(segments)


ALONE = "alone"
"""This rank alone has experts."""


@pytest.mark.parametrize("kind", [ALONE, "other ranks", "random"])
def test_layers_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, kind: str) -> None:
    """Whole layers are captured where one rank has all experts, else attention and router, or attention alone if
    routers choose at random. Terms and loads of routers are as without graphs."""
    monkeypatch.setattr(megatron_router, "apply_random_logits", lambda logits: logits.flip(-1))
    if kind == "other ranks":
        monkeypatch.setattr(ExpertLayer, "has_fixed_shapes", False)
    make_hf_llava(tmp_path / "hf", text="qwen3_moe")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    flags = {"data.packing": True, "router.aux_loss_coef": 0.1, "router.z_loss_coef": 0.1}
    flags |= {"router.force_balance": kind == "random"}
    run = run_config(1, 1, str(tmp_path / "megatron"), str(tmp_path), **flags)
    trainer = make_trainer(join_alone(), run)
    expected = train(trainer, loads=True)
    trainer = make_trainer(join_alone(), run)
    model = trainer.models[0].language_model
    segments = list(model_graphs.decoder_segments(model))
    numbers = [[1, 2, 3, 4]] if kind == ALONE else [[1], [2], [3], [4]]
    assert [[layer.layer_number for layer in layers] for layers in segments] == numbers
    graphs = LayerGraphs(segments, model.config, trainer.chunks[0], TokenPacks(LENGTH))
    captured = {id(p) for segment in graphs._segments for p in segment.parameters()}
    names = {name for name, p in model.decoder.layers.named_parameters() if id(p) not in captured}
    of_router = {"pre_mlp_layernorm.weight", "mlp.router.weight"} if kind == "random" else set()
    of_experts = set() if kind == ALONE else {f"mlp.experts.linear_fc{i}.weight" for i in (1, 2)}
    assert {name.partition(".")[2] for name in names if name[0] in "023"} == of_router | of_experts
    assert not any(name.startswith("1.") for name in names), "the second layer has a plain MLP"
    object.__setattr__(trainer, "graphs", [graphs])
    for one, other in zip(train(trainer, loads=True), expected, strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=1e-6)
        assert one[2] == other[2], "loads"
        assert {name: value for name, (value, _) in one[3].items()} == pytest.approx(
            {name: value for name, (value, _) in other[3].items()}, rel=1e-6
        )
    assert calls.calls == 3 * (GLOBAL_BATCH // 2) * len(segments)


def test_a_first_layer_whose_attention_trains_nothing(tmp_path: Path) -> None:
    """Adapters of experts are in no graph."""
    make_hf_llava(tmp_path / "hf", text="qwen3_moe")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    run = run_config(1, 1, str(tmp_path / "megatron"), str(tmp_path), **{"adapter.expert_r": 2})
    trainer = make_trainer(join_alone(), run)
    with pytest.raises(ConfigError, match="in layers with experts, and those of the first train nothing here: omit"):
        model_graphs.model_graphs(trainer.models[0], trainer.chunks[0], run)


def test_sizes_end_with_the_largest_pack() -> None:
    assert model_graphs.sizes_up_to(16384) == (4096, *range(8192, 16385, 1024))
    assert model_graphs.sizes_up_to(5000) == (1280, 2560, 2816, 3328, 3584, 3840, 4096, 4608, 4864, 5120)
    assert model_graphs.sizes_up_to(300) == (256, 512)


def test_what_cannot_have_graphs(checkpoint: Path, tmp_path: Path) -> None:
    groups = join_alone()
    run = run_config(1, 1, str(checkpoint), str(tmp_path))
    trainer = make_trainer(groups, run)
    with pytest.raises(ConfigError, match="--cuda-graphs needs Transformer Engine's layers"):
        model_graphs.model_graphs(trainer.models[0], trainer.chunks[0], run)


def test_which_towers_cannot_have_graphs(checkpoint: Path, tmp_path: Path) -> None:
    groups, hf = join_alone(), tmp_path / "hf"
    make_hf_qwen(hf, "qwen2_vl")
    import_hf(hf, tmp_path / "megatron")
    tiles, patches = str(checkpoint), str(tmp_path / "megatron")
    cases = [
        (tiles, {}, "images of any size"),
        (patches, {"model.freeze_vision_model": True}, "captures a trained tower"),
    ]
    for folder, flags, message in cases:
        run = run_config(1, 1, folder, str(tmp_path), **flags)
        trainer = make_trainer(groups, run)
        with pytest.raises(ConfigError, match=f"--cuda-graphs-vision .*{message}"):
            model_graphs.tower_graphs(trainer.models[0].vision_model, trainer.chunks[0], run)


def test_rules(tmp_path: Path) -> None:
    """Options that graphs do not allow are refused, each by name."""
    base = [f"checkpoint.save_dir={tmp_path}", "checkpoint.init=true", "model.cuda_graphs=true"]
    alone = load_run_config(None, base)
    found = check_run(alone, None, world_size=1, device_available=True)
    assert any("--cuda-graphs has no effect without --packing" in x for x in found)
    others = ["data.packing=true", "parallel.pipeline_model_parallel_size=2", "model.recompute=full"]
    others += ["model.cuda_graphs_vision=true", "model.freeze_vision_model=false", "model.recompute_vision=full"]
    run = load_run_config(None, [*base, *others, "adapter.r=4", "adapter.dropout=0.1", "data.seq_length=1024"])
    found = [x for x in check_run(run, None, world_size=2, device_available=False) if "--cuda-graphs" in x]
    words = ("on GPUs", "--pp 1 only", "--recompute full", "--lora-dropout", "recompute_vision", "a trained tower")
    assert len(found) == len(words) and all(any(word in x for x in found) for word in words)
    assert loader_multiple(run) == 1024
    run = load_run_config(None, [*base, "training.fp8=true", "training.fp8_vision=true"])
    found = check_run(run, None, world_size=1, device_available=True)
    assert any("--fp8-vision needs --cuda-graphs-vision" in x for x in found)


def test_adapters_are_gathered_before_the_forward_pass() -> None:
    """megatron-core would wait for them in the forward pass of their own modules, which never run."""
    distributed = ["parallel.use_distributed_optimizer=true"]
    assert overlaps_param_gather(load_run_config(None, distributed))
    assert not overlaps_param_gather(load_run_config(None, [*distributed, "adapter.r=4"]))
