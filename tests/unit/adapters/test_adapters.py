"""Which layers get an adapter, and what is said about names that no layer has."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn

from llava_mcore.adapters.adaptation import adapter_setup_of, base_of
from llava_mcore.adapters.adapter_record import Base, write_record
from llava_mcore.adapters.linear_layers import ModelLayers, model_layers
from llava_mcore.adapters.peft_config import peft_config, plan_of_folder
from llava_mcore.adapters.peft_tensors import PREFIX, WEIGHTS, names_in_folder, open_weights
from llava_mcore.adapters.targets import plan_from_config, trained_parameters
from llava_mcore.adapters.vllm_rules import vllm_problems, vllm_rank, with_one_scale
from llava_mcore.checkpoint.layout import iteration_folder, write_tracker
from llava_mcore.cli import serve
from llava_mcore.config.load import load_run_config, save_run_config
from llava_mcore.config.rules.all_rules import check_run
from llava_mcore.config.sections.adapter import AdapterConfig
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.errors import CheckpointError, ConfigError, ConversionError
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of
from tests.helpers.cases import CASES, Case, make_case
from tests.helpers.peft_models import make_peft_folder
from tests.helpers.tiny_hf import make_hf_llava

TEXT = "model.language_model.layers.0.self_attn."
DOWN = "model.language_model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "hf"
    make_hf_llava(folder, text="qwen2")
    return folder


@pytest.fixture(scope="module")
def layers(hf: Path) -> ModelLayers:
    return model_layers(load_hf_config(hf))


def plan(layers: ModelLayers, **settings: Any) -> Any:
    return plan_from_config(AdapterConfig(**settings), layers)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_linear_layer_that_is_used_can_be_adapted(tmp_path: Path, case: Case) -> None:
    """Of every class and family, under the names of transformers' own modules."""
    model = make_case(case, tmp_path)
    found = model_layers(load_hf_config(tmp_path)).members
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert found.keys() <= linears
    # A gate of one row, which megatron-core keeps as a parameter.
    gates = {name for name in linears if name.endswith(".shared_expert_gate")}
    not_used = linears - found.keys() - gates
    assert {name for name in not_used if "vision_tower" not in name and "vision_model" not in name} == {"lm_head"}
    if case.vision.startswith("dinov2") and Version(transformers.__version__) >= Version("5.18"):
        return  # its modules have other names than its tensors in files, so they cannot be adapted
    last = "layers.3." if "layers.3." in str(not_used) else "layer.3."
    tower = [name for name in not_used if name != "lm_head" and ".head." not in name]
    assert all(last in name or "layers.2." in name for name in tower), "after the last feature layer"


def test_ranks_by_part_and_names_as_in_peft(layers: ModelLayers) -> None:
    language = plan(layers, r=8, targets="q_proj,v_proj")
    assert set(language.lora_ranks) == {
        f"model.language_model.layers.{i}.self_attn.{x}_proj" for i in range(4) for x in "qv"
    }, "the tower's layers of these names have no rank"
    both = plan(layers, r=8, vision_r=2, targets="q_proj")
    assert sorted(set(both.lora_ranks.values())) == [2, 8] and len(both.lora_ranks) == 7
    everything = plan(layers, r=8, vision_r=4, projection_r=2)
    assert everything.lora_ranks.keys() == layers.members.keys()
    single = plan(layers, r=8, alpha=4, rslora=True, targets=f"{TEXT}q_proj")
    assert single.lora_ranks == {f"{TEXT}q_proj": 8} and single.scaling(f"{TEXT}q_proj") == 4 / 8**0.5
    saved = plan(layers, r=8, projection_r=2, modules_to_save="linear_1")
    assert [name for name in saved.lora_ranks if "projector" in name] == ["model.multi_modal_projector.linear_2"]


def test_all_unknown_names_are_listed_at_once(layers: ModelLayers) -> None:
    with pytest.raises(ConfigError) as error:
        plan(layers, r=8, targets="q_prj,lm_head,linear_1,k_proj", modules_to_save="projector")
    message = str(error.value)
    assert "4 problems" in message
    assert "--lora-targets q_prj: the model has no such linear layer; it has" in message
    assert "lm_head: no linear layer that can be adapted here; to train it in full" in message
    assert "--lora-targets linear_1: its layers have no rank; give adapter.projection_r" in message
    assert "--lora-modules-to-save projector: the model has no such module; it has" in message


def test_a_part_of_one_parameter_cannot_be_trained_in_full(layers: ModelLayers) -> None:
    with pytest.raises(ConfigError, match=r"q_proj.weight, .*are one parameter here \(and 13 parameters like it\)"):
        trained_parameters(plan(layers, r=8, targets="down_proj", modules_to_save="self_attn.q_proj"), layers)
    trained = trained_parameters(plan(layers, r=8, modules_to_save="multi_modal_projector", bias="all"), layers)
    parts = {name.partition(".")[0] for name, value in trained.items() if value and not name.endswith("bias")}
    assert parts == {"vision_projection"}
    assert trained["language_model.decoder.layers.0.self_attention.linear_qkv.bias"]


def test_a_tied_embedding_is_not_trained_apart(tmp_path: Path) -> None:
    make_hf_llava(tmp_path, tie=True)
    with pytest.raises(ConfigError, match="one matrix for embedding and output layer"):
        plan(model_layers(load_hf_config(tmp_path)), r=8, modules_to_save="lm_head")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model.freeze_vision_model": False}, "with an adapter the model is frozen"),
        ({"model.unfreeze": "*.bias"}, "name what to train in full with --lora-modules-to-save"),
        ({"checkpoint.init": True, "checkpoint.load": None}, "--init makes a random model"),
        (
            {"adapter.quantize": "nf4", "training.fp8": True},
            "--lora-quantize nf4 dequantizes matrices to half precision",
        ),
        (
            {"adapter.quantize": "fp8", "training.fp8": True, "training.fp8_recipe": "blockwise"},
            "--lora-quantize fp8 has one scale per matrix",
        ),
        (
            {
                "adapter.quantize": "fp8",
                "training.fp8": True,
                "training.fp8_recipe": "tensorwise",
                "training.fp8_first_layers_bf16": 1,
            },
            "--lora-quantize fp8 leaves no layer in bf16",
        ),
        ({"adapter.load": "/nowhere"}, "omit --lora-r"),
        ({"adapter.frozen": "/some/default"}, "several adapters are called default"),
        ({"adapter.frozen": "/some/v1.0"}, "an adapter is named by its folder"),
        ({"adapter.frozen": "/some/other"}, "/some/other: no adapter_config.json"),
        ({"optimizer.vision_lr": 1e-3}, "optimizer.vision_lr has no effect on a part that is frozen"),
        ({"adapter.r": None, "adapter.alpha": 8}, "--lora-alpha has no effect without --lora-r"),
    ],
)
def test_options_that_contradict_an_adapter(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    """Each is refused with a message that says what to change."""
    given = {"checkpoint.load": tmp_path, "checkpoint.save_dir": tmp_path, "training.train_iters": 1, "adapter.r": 8}
    run = load_run_config(None, [], given | flags)
    found = [text for text in check_run(run, None, 1, device_available=False) if message in text]
    assert len(found) == 1


def test_files_of_other_adapters_are_refused_by_name(tmp_path: Path, hf: Path, layers: ModelLayers) -> None:
    folder = make_peft_folder(hf, tmp_path / "lora", r=2, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ConversionError) as error:
        plan_of_folder(folder, "x", layers, is_trained=True)
    assert "1 problem" in str(error.value) and "adapts lm_head, which is not a linear layer" in str(error.value)
    for key, value, message in (
        ("peft_type", "IA3", "expected 'LORA'"),
        ("init_lora_weights", "pissa_niter_4", "changes the model's own weights, which are not in this folder"),
        ("use_qalora", True, "use_qalora = True is not supported"),
        ("alpha_pattern", {"(a+)+$": 3}, "names and their ends are supported"),
    ):
        folder = make_peft_folder(hf, tmp_path / key, r=2, target_modules=["o_proj"])
        config = json.loads((folder / "adapter_config.json").read_text()) | {key: value}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ConversionError, match=message):
            plan_of_folder(folder, "x", layers, is_trained=True)


def test_layers_that_do_not_change_the_output_are_skipped(
    tmp_path: Path, hf: Path, layers: ModelLayers, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT's targets by name include the tower's last layer; so do the biases of the whole model."""
    for name, options in (
        ("q", {"target_modules": ["q_proj"]}),
        ("all", {"target_modules": ["o_proj"], "bias": "all"}),
    ):
        with caplog.at_level(logging.INFO):
            found = plan_of_folder(make_peft_folder(hf, tmp_path / name, r=2, **options), "x", layers, is_trained=True)
        assert found.lora_ranks.keys() == {x for x in layers.members if x.endswith(options["target_modules"][0])}
    assert "2 tensors belong to layers that do not change the model's output and are skipped" in caplog.text
    assert not [x for x in layers.members if "vision_tower" in x and "layers.3." in x]


def test_an_adapter_of_a_part_alone_works_in_the_whole_model(tmp_path: Path, hf: Path, layers: ModelLayers) -> None:
    """Of the text model (with and without its head), or of the model without its head."""
    folder = make_peft_folder(hf, tmp_path / "lora", r=2, target_modules=r".*language_model.*\.(q_proj|down_proj)")
    whole, tensors = plan_of_folder(folder, "x", layers, is_trained=True), load_file(folder / WEIGHTS)
    long = f"{PREFIX}model.language_model."
    for short in (PREFIX, f"{PREFIX}model.", f"{PREFIX}language_model."):
        save_file({name.replace(long, short): x for name, x in tensors.items()}, folder / WEIGHTS)
        assert plan_of_folder(folder, "x", layers, is_trained=True).lora_ranks == whole.lora_ranks
    wide = {name.replace(long, PREFIX): torch.zeros(2, 65) if "lora_A" in name else x for name, x in tensors.items()}
    save_file(wide, folder / WEIGHTS)
    with pytest.raises(ConversionError, match=r"q_proj.lora_A.weight is \(2, 65\), expected \(2, 64\)"):
        plan_of_folder(folder, "x", layers, is_trained=True)
    save_file({name.replace(long, f"{PREFIX}other."): x for name, x in tensors.items()}, folder / WEIGHTS)
    with pytest.raises(ConversionError, match="this model has no module of that name, so PEFT would not apply it"):
        plan_of_folder(folder, "x", layers, is_trained=True)


def test_the_output_layer_beside_a_text_models_adapter_is_found(tmp_path: Path, hf: Path, layers: ModelLayers) -> None:
    """LlamaForCausalLM has `model` and `lm_head`; only the first is inside another module in the whole model."""
    options: dict[str, Any] = {"r": 2, "target_modules": r".*language_model.*\.q_proj"}
    folder = make_peft_folder(hf, tmp_path / "lora", modules_to_save=["lm_head", "embed_tokens"], **options)
    tensors = load_file(folder / WEIGHTS)
    long = f"{PREFIX}model.language_model."
    save_file({name.replace(long, f"{PREFIX}model."): x for name, x in tensors.items()}, folder / WEIGHTS)
    adapter = plan_of_folder(folder, "x", layers, is_trained=True)
    assert set(adapter.modules_to_save) == {"lm_head", "model.language_model.embed_tokens"}
    head = names_in_folder(open_weights(folder).tensors, layers)["lm_head.weight"]
    assert head == f"{PREFIX}lm_head.weight"


def test_an_adapter_of_all_but_the_output_layer_is_mapped(tmp_path: Path, hf: Path, layers: ModelLayers) -> None:
    """get_peft_model(model.model): the tower's names are then those of a whole model in transformers 4."""
    folder = make_peft_folder(hf, tmp_path / "lora", r=2, target_modules=["q_proj"])
    whole, tensors = plan_of_folder(folder, "x", layers, is_trained=True), load_file(folder / WEIGHTS)
    save_file({name.replace(f"{PREFIX}model.", PREFIX): x for name, x in tensors.items()}, folder / WEIGHTS)
    assert plan_of_folder(folder, "x", layers, is_trained=True).lora_ranks == whole.lora_ranks


@pytest.mark.parametrize("rslora", [False, True])
def test_an_export_has_one_scale_as_vllm_computes_it(hf: Path, layers: ModelLayers, rslora: bool) -> None:
    model_class = architecture_of(load_hf_config(hf)).model_class
    lora_ranks = {"r": 32, "vision_r": 8, "projection_r": 2}
    trained = plan(layers, **lora_ranks, alpha=16, rslora=rslora)
    written, factors = with_one_scale(trained, may_change_b=True)
    config = peft_config(written, layers, "base", model_class)
    assert vllm_problems(config) == [] and vllm_rank(config) == 32
    assert config["auto_mapping"] == {
        "base_model_class": "LlavaForConditionalGeneration",
        "parent_library": model_class.__module__,
    }
    for name in trained.lora_ranks:
        assert math.frexp(factors[name])[0] == 0.5, "a power of two"
        assert written.scaling(name) * factors[name] == pytest.approx(trained.scaling(name), rel=1e-12)
    for kept in (plan(layers, **(lora_ranks | {"vision_r": 6})), trained):
        same, ones = with_one_scale(kept, may_change_b=kept is not trained)
        assert same == kept and set(ones.values()) == {1}
        (problem,) = vllm_problems(peft_config(same, layers, "base", model_class))
        assert "vLLM scales all by one number" in problem


def test_serve_says_what_vllm_refuses_of_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"peft_type": "LORA", "r": 12, "lora_alpha": 12, "base_model_name_or_path": "some/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert serve.main(["--hf-dir", str(tmp_path), "--dry-run", "--served-model-name", "x"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("vllm serve some/base ") and "--max-lora-rank 16" in shown
    assert f"--lora-modules x={tmp_path}" in shown
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(config | {"use_dora": True, "modules_to_save": ["lm_head"]})
    )
    assert serve.main(["--hf-dir", str(tmp_path), "--dry-run"]) == 2
    shown = capsys.readouterr().err
    assert "(use_dora), which vLLM refuses" in shown and "lm_head were trained in full" in shown


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"peft_type": "IA3"}, "it is IA3 (peft_type), and vLLM computes LORA only"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' changes the model's own weights"),
        ({"trainable_token_indices": [1]}, "trained with trainable_token_indices = [1], which vLLM does not read"),
        ({"rank_pattern": {"q_proj": 1024}, "alpha_pattern": {"q_proj": 1024}}, "its rank is 1024"),
        ({"alpha_pattern": {"q_proj": 6}}, "its layers are scaled by 0.5 and 1"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None"),
    ],
)
def test_serve_refuses_adapters_that_vllm_would_compute_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], expected: str
) -> None:
    config = {"peft_type": "LORA", "r": 12, "lora_alpha": 12, "base_model_name_or_path": "some/base"} | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert serve.main(["--hf-dir", str(tmp_path), "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert expected in shown.err and not shown.out


def test_tensors_that_do_not_fit_are_listed_before_a_run_starts(tmp_path: Path, hf: Path, layers: ModelLayers) -> None:
    options: dict[str, Any] = {"r": 2, "target_modules": ["down_proj"], "modules_to_save": ["lm_head"]}
    folder = make_peft_folder(hf, tmp_path / "lora", **options)
    tensors = load_file(folder / WEIGHTS)
    head, gone, renamed = (f"{PREFIX}{x}" for x in ("lm_head.weight", f"{DOWN}.lora_B.weight", "some.weight"))
    tensors[head] = torch.cat([tensors[head], tensors[head][:2]])
    tensors[renamed] = tensors.pop(gone)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConversionError) as error:
        plan_of_folder(folder, "x", layers, is_trained=True)
    message = str(error.value)
    assert "3 problems" in message and f"{DOWN}.lora_B.weight is missing" in message
    assert "some.weight has no counterpart here" in message
    rows, width = layers.entries["language_model.output_layer.weight"].layout.rows, 64  # type: ignore[attr-defined]
    assert f"lm_head.weight is ({rows + 2}, {width}), expected ({rows}, {width})" in message
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(ConversionError, match=r"adapter_model\.bin is not read; load it with PEFT and write it again"):
        plan_of_folder(folder, "x", layers, is_trained=True)


def test_two_adapters_cannot_have_the_same_module(tmp_path: Path, hf: Path) -> None:
    first = import_hf(hf, tmp_path / "megatron")
    saved = {"r": 2, "target_modules": ["down_proj"], "modules_to_save": ["multi_modal_projector"]}
    folder = make_peft_folder(hf, tmp_path / "style", **saved)
    adapter = AdapterConfig(r=2, modules_to_save=("multi_modal_projector",), frozen=(folder,))
    with pytest.raises(ConfigError, match=r"default and style both have vision_projection\.\S+"):
        adapter_setup_of(adapter, load_hf_config(hf), first, None)


def test_a_run_that_starts_from_an_adapter_has_its_settings(tmp_path: Path, hf: Path, layers: ModelLayers) -> None:
    """Others would have no effect: the checkpoint says what the adapter is."""
    first = import_hf(hf, tmp_path / "megatron")
    given = {
        "checkpoint.load": first.parent,
        "checkpoint.save_dir": tmp_path,
        "training.train_iters": 1,
        "adapter.r": 8,
    }
    run = load_run_config(None, [], given)
    (tmp_path / "iter").mkdir()
    write_record(tmp_path / "iter", Base.of(first), [plan_from_config(run.adapter, layers)], layers)
    save_run_config(run, tmp_path / "iter" / "run.yaml")
    same = adapter_setup_of(run.adapter, load_hf_config(hf), tmp_path / "iter", None)
    assert same is not None and same.plans[0].lora_ranks == plan(layers, r=8).lora_ranks
    other = run.adapter.model_copy(update={"r": 16, "alpha": 4, "dora": True, "frozen": (tmp_path / "style",)})
    with pytest.raises(ConfigError) as error:
        adapter_setup_of(other, load_hf_config(hf), tmp_path / "iter", None)
    message = str(error.value)
    assert "4 problems" in message and "adapter.r: it has 8, this run asks for 16" in message
    assert "adapter.alpha: it has " in message and ", this run asks for 4\n" in message
    assert "adapter.frozen: it has none, this run asks for style" in message


def test_other_weights_than_the_adapter_s_are_refused(tmp_path: Path, hf: Path) -> None:
    first = import_hf(hf, tmp_path / "first")
    base = Base.of(first)
    assert base.found_at(None) == first
    import_hf(hf, tmp_path / "again", tensor_parallel=2)
    assert base.found_at(tmp_path / "again"), "the same weights, imported otherwise"
    make_hf_llava(tmp_path / "other-hf", text="qwen2", seed=5)
    import_hf(tmp_path / "other-hf", tmp_path / "other")
    with pytest.raises(CheckpointError, match="holds other weights than those that the adapter was trained on"):
        base.found_at(tmp_path / "other")


def test_a_run_that_continues_another_run_s_adapter_resumes(tmp_path: Path, hf: Path, layers: ModelLayers) -> None:
    """Its command still names the other run's folder, which does not hold the model."""
    first = import_hf(hf, tmp_path / "megatron")
    for name, iteration in (("one", 1), ("two", 2)):
        checkpoint = iteration_folder(tmp_path / name, iteration)
        checkpoint.mkdir(parents=True)
        (checkpoint / "metadata.json").write_text("{}")
        write_record(checkpoint, Base.of(first), [plan_from_config(AdapterConfig(r=2), layers)], layers)
        write_tracker(checkpoint.parent, iteration)
    assert base_of(checkpoint, tmp_path / "one").folder == first
    assert base_of(checkpoint, tmp_path / "megatron").folder == first


def test_without_an_adapter_nothing_is_looked_up(hf: Path) -> None:
    assert adapter_setup_of(AdapterConfig(), load_hf_config(hf), None, None) is None
