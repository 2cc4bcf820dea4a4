"""An adapter on every class: PEFT's logits, and the gradient of every one of its tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor

from llava_mcore.adapters.adaptation import adapter_setup_of
from llava_mcore.adapters.factors import CHILD
from llava_mcore.adapters.linear_layers import BIAS, WEIGHT, ModelLayers, model_layers
from llava_mcore.adapters.peft_config import CONFIG, plan_of_folder, write_config
from llava_mcore.adapters.peft_tensors import PREFIX, WEIGHTS, expected_tensors, without_wrappers
from llava_mcore.adapters.targets import plan_from_config, trained_parameters
from llava_mcore.checkpoint.layout import latest_checkpoint
from llava_mcore.config.sections.adapter import AdapterConfig
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.load_model import load_part
from llava_mcore.convert.logits_worker import given_media
from llava_mcore.errors import ConfigError
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import set_trained, whole_names
from llava_mcore.parallel.batch import longest_media
from llava_mcore.parallel.groups import join_alone
from llava_mcore.training.load_model import load_adapted
from tests.helpers.cases import EACH_CLASS, Case, case_inputs, hf_inputs, make_case
from tests.helpers.fixed_dropout import RATE, fix_peft, fixed_here
from tests.helpers.peft_models import make_peft_folder, open_hf, open_hf_in_4_bits
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import WITH_EXPERTS

BIASES = {"bias": "lora_only"}
KINDS: dict[str, dict[str, Any]] = {"lora": BIASES, "dora-dropout": {"use_dora": True, "lora_dropout": RATE}}


@pytest.fixture(scope="module", params=EACH_CLASS, ids=lambda case: case.architecture)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the class, imported."""
    root = tmp_path_factory.mktemp(case.architecture)
    make_case(case, root / "hf")
    import_hf(root / "hf", root / "megatron")
    return root


@pytest.fixture(scope="module")
def inputs(case: Case, folder: Path) -> dict[str, Tensor]:
    return case_inputs(case, open_hf(folder / "hf"), folder / "hf")


def test_a_module_is_not_the_beginning_of_another_s_name(tmp_path: Path) -> None:
    make_hf_llava(tmp_path, text_overrides={"num_hidden_layers": 11})
    layers = model_layers(load_hf_config(tmp_path))
    settings = AdapterConfig(r=8, modules_to_save="language_model.layers.1")
    trained = trained_parameters(plan_from_config(settings, layers), layers)
    assert {name.split(".layers.")[1].split(".")[0] for name, value in trained.items() if value} == {"1"}


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 8, "vision_r": 4, "alpha": 5, "dropout": 0.25, "bias": "all"},
        {"r": 8, "projection_r": 2, "targets": "q_proj,k_proj,v_proj,linear_1", "dora": True, "bias": "lora_only"},
        {"vision_r": 3, "rslora": True, "modules_to_save": "embed_tokens,linear_2"},
    ],
)
def test_a_written_adapter_is_read_as_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    """By us, with alphas that are not integers; and by PEFT."""
    hf = make_hf_llava(tmp_path / "hf", text="qwen2")
    layers = model_layers(load_hf_config(tmp_path / "hf"))
    plan = plan_from_config(AdapterConfig(**settings), layers)
    first = next(iter(plan.lora_ranks))
    plan = replace(plan, alphas=dict.fromkeys(plan.lora_ranks, 6.5) | {first: 3.25})
    write_config(tmp_path, plan, layers, None, type(hf))
    shapes = expected_tensors(plan, layers)
    save_file({PREFIX + name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / WEIGHTS)
    assert plan_of_folder(tmp_path, plan.name, layers, is_trained=True) == plan
    theirs = LoraConfig.from_pretrained(tmp_path)
    found = (theirs.lora_dropout, theirs.bias, theirs.use_dora, theirs.use_rslora, theirs.lora_alpha)
    assert found == (plan.dropout, plan.bias, plan.dora, plan.rslora, 6.5)
    adapted = get_peft_model(hf, theirs).get_base_model()
    for name, rank in plan.lora_ranks.items():
        layer = adapted.get_submodule(name)
        assert (layer.r["default"], layer.scaling["default"]) == (rank, pytest.approx(plan.scaling(name))), name


def test_the_first_pattern_counts_and_anchors_are_read(tmp_path: Path) -> None:
    """alpha_pattern as PEFT reads it, where two of its patterns find a layer."""
    hf = make_hf_llava(tmp_path / "hf")
    layers = model_layers(load_hf_config(tmp_path / "hf"))
    plan = plan_from_config(AdapterConfig(r=8, targets="q_proj,v_proj"), layers)
    write_config(tmp_path, plan, layers, None, type(hf))
    shapes = expected_tensors(plan, layers)
    save_file({PREFIX + name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / WEIGHTS)
    of_one = next(name for name in plan.lora_ranks if name.endswith("q_proj"))
    config = json.loads((tmp_path / CONFIG).read_text())
    config["alpha_pattern"] = {"^" + of_one.replace(".", "\\."): 2, "q_proj": 4, "self_attn.q_proj": 32, of_one: 64}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    found = plan_of_folder(tmp_path, plan.name, layers, is_trained=True)
    assert sorted(set(found.alphas.values())) == [2, 4, 16]
    adapted = get_peft_model(hf, LoraConfig.from_pretrained(tmp_path)).get_base_model()
    for name in plan.lora_ranks:
        assert adapted.get_submodule(name).scaling["default"] == found.scaling(name), name


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_peft(folder: Path, inputs: dict[str, Tensor], kind: str) -> None:
    adapter = everywhere(folder, **KINDS[kind])
    theirs = PeftModel.from_pretrained(open_hf(folder / "hf"), adapter, is_trainable=True)
    if kind != "lora":
        fix_peft(theirs)
    with fixed_here():
        check(folder, adapter, theirs, inputs, "none")


def test_those_on_a_language_model_in_4_bits_too(case: Case, folder: Path, inputs: dict[str, Tensor]) -> None:
    """QLoRA; tower and connector keep their precision."""
    if case.architecture in WITH_EXPERTS:
        pytest.skip("its experts have no whole blocks; test_quantized_experts has some that do")
    adapter = everywhere(folder, **BIASES)
    theirs = PeftModel.from_pretrained(open_hf_in_4_bits(folder / "hf"), adapter, is_trainable=True)
    check(folder, adapter, theirs, inputs, "nf4")


def test_experts_have_no_adapters(case: Case, folder: Path) -> None:
    if case.architecture not in WITH_EXPERTS:
        pytest.skip("it has no experts")
    layers = model_layers(load_hf_config(folder / "hf"))
    assert layers.members and not any(".experts" in name or name.endswith(".gate") for name in layers.members)
    for target, said in (("experts", "no linear layer that can be adapted"), ("mlp.gate", "no linear layer that can")):
        with pytest.raises(ConfigError, match=said):
            plan_from_config(AdapterConfig(r=2, targets=(target,)), layers)
    plan = plan_from_config(AdapterConfig(r=2, targets=("q_proj",), modules_to_save=("experts",)), layers)
    with pytest.raises(ConfigError, match="experts are not trained beside adapters"):
        trained_parameters(plan, layers)


def everywhere(folder: Path, **options: Any) -> Path:
    """Return an adapter of PEFT's on every layer that can have one, and without DoRA and dropout on all experts."""
    layers = model_layers(load_hf_config(folder / "hf"))
    targets: dict[str, Any] = {"target_modules": list(layers.members)}
    if layers.expert_members and not options.get("use_dora"):
        targets["target_parameters"] = list(layers.expert_members)
        targets["rank_pattern"] = {"down_proj": 2}
    return make_peft_folder(folder / "hf", folder / "adapter", r=3, lora_alpha=5, **targets, **options)


def check(folder: Path, adapter: Path, theirs: Any, inputs: dict[str, Tensor], quantize: str) -> None:
    ours, layers, trained = adapted(folder, adapter, quantize)
    expected = theirs.train()(**hf_inputs(theirs, inputs)).logits
    found = logits(ours.train(), inputs)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    for each in (found, expected):
        (each * weights).mean().backward()
    here, there = gradients(ours, layers) | own_gradients(ours, layers, trained), peft_gradients(theirs)
    assert here.keys() == there.keys()
    largest = max(x.abs().max() for x in there.values())
    for name, gradient in there.items():
        assert (here[name] - gradient).abs().max() <= 1e-5 * largest, name
        if name.endswith(BIAS) and gradient.abs().max() <= 1e-6 * largest:
            continue  # a bias of keys: it adds the same to all scores of a query
        assert gradient.norm() > 0 and (here[name] - gradient).norm() <= 1e-2 * gradient.norm(), name


def adapted(root: Path, adapter: Path, quantize: str) -> tuple[VisionLanguageModel, ModelLayers, frozenset[str]]:
    """Return our model with an adapter of PEFT's, and what is trained of the model itself."""
    groups, checkpoint = join_alone(), latest_checkpoint(root / "megatron")[0]
    adapter_setup = adapter_setup_of(AdapterConfig(load=adapter), load_hf_config(root / "hf"), checkpoint, None)
    assert adapter_setup is not None
    model = load_part(groups, checkpoint)
    set_trained(model, adapter_setup.trained)
    load_adapted([model], adapter_setup, groups, quantize=quantize, multiplies_in_fp8=False, seed=0)
    return model, adapter_setup.layers, adapter_setup.own_names


def logits(model: VisionLanguageModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return our logits [b, s, vocabulary], with their graph."""
    ids, media = inputs["input_ids"], given_media(inputs)
    positions = inputs.get("position_ids", torch.arange(ids.shape[1]).expand(ids.shape))
    found: Tensor = model(ids, positions, media, max_media_seqlen=longest_media(media))
    return found


def gradients(model: VisionLanguageModel, layers: ModelLayers) -> dict[str, Tensor]:
    """Return the gradients of our adapter by PEFT's names."""
    found = {}
    for name, member in layers.members.items():
        factors: Any = model.get_submodule(f"{member.part}.{CHILD}.default.{member.key}")
        found[f"{name}.lora_A"] = without_padding(factors.lora_A.grad, 1, member.inputs)
        for key, parameters in (("lora_B", factors.lora_B), ("lora_magnitude_vector", factors.magnitude)):
            if len(parameters):
                gradient = torch.cat([x.grad for x in parameters])
                found[f"{name}.{key}"] = without_padding(gradient, 0, member.outputs)
    for name, member in layers.expert_members.items():
        module = model.get_submodule(member.part).get_submodule(CHILD).get_submodule("default")
        if member.key in dict(module.named_modules()):
            of_experts: Any = module.get_submodule(member.key)
            A, B = of_experts.lora_A.grad, of_experts.lora_B.grad
            found[f"{name}.lora_A"], found[f"{name}.lora_B"] = A.flatten(0, 1), B.permute(1, 2, 0).flatten(1)
    return found


def without_padding(gradient: Tensor, dim: int, size: int) -> Tensor:
    """Return a gradient without that of a layer's padding, which must be zero."""
    kept, padding = gradient.split([size, gradient.shape[dim] - size], dim)
    assert not padding.any()
    return kept


def own_gradients(model: VisionLanguageModel, layers: ModelLayers, trained: frozenset[str]) -> dict[str, Tensor]:
    """Return those of the model's own parameters."""
    found: dict[str, Tensor] = {}
    for name, parameter in whole_names(model).items():
        if name in trained:
            assert parameter.grad is not None, name
            found |= layers.entries[name].to_hf(parameter.grad)
    return found


def peft_gradients(model: Any) -> dict[str, Tensor]:
    """Return those of PEFT's, without layers that do not change the output."""
    of_all = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    names = {name: without_wrappers(name.replace(".default", "")) for name in of_all}
    ends = (".lora_A", ".lora_B", ".lora_magnitude_vector")
    short = {key: x.removesuffix(WEIGHT) if x.removesuffix(WEIGHT).endswith(ends) else x for key, x in names.items()}
    return {short[key]: x for key, x in of_all.items()}
