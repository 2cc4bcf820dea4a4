"""The recipes in examples/: their configurations resolve at their layouts, their commands parse, their figures are
those of benchmarks/results."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from benchmarks.marked_tables import ROOT, TABLES, with_table
from llava_mcore.cli import generate, train
from llava_mcore.cli.base.commands import COMMANDS
from llava_mcore.config.flags import parse_command_line
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.launch import start as launch
from tests.helpers.recipes import EXAMPLES, MODELS, Command, commands, make_places
from tests.helpers.shards import jpeg, make_dataset
from tests.helpers.tiny_audio import make_hf_audio
from tests.helpers.tiny_hf import make_hf_llava

GPUS = 8
ON_CPUS = {
    "quickstart/train.yaml": "-g 4 --tp 2 --pp 2",
    "speech/train.yaml": "-g 2",
    "small-vlm/stage1.yaml": "-g 2",
    "small-vlm/stage2.yaml": "-g 2",
}
"""Configurations whose commands are in the example's run.py, which other tests run."""
VARIANTS = [
    ("llava-1.5-7b/stage2.yaml", "--micro-batch-size 1"),
    ("llava-1.5-7b/stage2.yaml", "--tp 2 --sequence-parallel"),
    ("llava-jp-1.8b/stage2.yaml", "--tp 4 --sequence-parallel"),
    ("llava-jp-1.8b/stage1.yaml", "-g 8 --tp 4"),
    ("llava-onevision-7b/stage2-ov.yaml", "--packing --seq-length 16384"),
    ("qwen2.5-vl-7b/finetune.yaml", "--tp 2 --sequence-parallel"),
    ("qwen2.5-vl-7b/full.yaml", "--tp 2 --sequence-parallel"),
    ("qwen2.5-vl-lora/lora.yaml", "--tp 2 --sequence-parallel"),
    (
        "lora-one-gpu/lora.yaml",
        "--lora-r 128 --lora-alpha 256 --lora-modules-to-save multi_modal_projector optimizer.projection_lr=2e-5",
    ),
]
"""Configuration -> flags that its README suggests to add."""
RUN = "train"
CONFIGS = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*/*.yaml"))
ALL = [command for recipe in MODELS for command in commands(recipe)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Indexed shards with a part for training and one for validation."""
    root = make_dataset(tmp_path_factory.mktemp("shards") / "data", num_samples=4)
    split = root / ".nv-meta" / "split.yaml"
    parts = yaml.safe_load(split.read_text())
    parts["split_parts"] = {"train": ["000000.tar"], "val": ["000001.tar"], "test": []}
    split.write_text(yaml.safe_dump(parts))
    return root


@pytest.fixture(scope="module")
def place_of(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Any:
    """Return the folders of a recipe, made once."""
    return cache(lambda recipe: make_places(recipe, tmp_path_factory.mktemp(recipe), shards))


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_count_gpus", lambda: GPUS)
    monkeypatch.chdir(ROOT)


def training_command(config: str) -> Command:
    """The command of the README that names a configuration."""
    found = [x for x in ALL if x.name == RUN and f"examples/{config}" in x.words]
    assert len(found) == 1, f"{config} is not in exactly one command of its README"
    return found[0]


def resolved(flags: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `run.py --dry-run` says about flags, with `--submit` and its options removed."""
    assert train.main([*flags, "--dry-run"]) == 0, capsys.readouterr().err
    shown: dict[str, Any] = yaml.safe_load(capsys.readouterr().out.split("# command")[0])
    return shown


@pytest.mark.parametrize("config", [x for x in CONFIGS if x not in ON_CPUS])
def test_configuration_resolves_at_its_layout(
    config: str, place_of: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = training_command(config)
    flags = command.flags(place_of(command.recipe))
    assert train.main([*flags, "--dry-run"]) == 0, capsys.readouterr().err
    job = capsys.readouterr().out
    count = flags[flags.index("-g") + 1]
    assert f"#SBATCH --gpus-per-node={count}\n" in job and "#SBATCH --partition=gpu\n" in job
    assert f"examples/{config}" in job
    kept = [text for text in flags if text != "--submit" and not text.startswith("--sbatch-options")]
    if "--node" in kept:  # without SLURM a machine says which one it is
        kept += ["--rank", "0", "-m", "localhost"]
    shown = resolved(kept, capsys)
    written = yaml.safe_load((EXAMPLES / config).read_text(encoding="utf-8"))
    for section, values in written.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            assert shown[section][key] == value, f"{section}.{key}"
    assert shown["training"]["precision"] == "bf16" and shown["parallel"]["backend"] == "nccl"


@pytest.mark.parametrize(("config", "more"), VARIANTS)
def test_variants_that_the_text_names(
    config: str, more: str, place_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = training_command(config)
    text = (EXAMPLES / command.recipe / "README.md").read_text(encoding="utf-8")
    assert f"`{more}`" in " ".join(text.split())
    flags = [*command.flags(place_of(command.recipe)), *more.split(), "--dry-run"]
    assert train.main(flags) == 0, capsys.readouterr().err


@pytest.mark.parametrize("config", ON_CPUS)
def test_configuration_of_an_example_resolves(
    config: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_count_gpus", lambda: 0)
    if config == "speech/train.yaml":
        make_hf_audio(tmp_path / "hf", text_overrides={"max_position_embeddings": 1024})
    else:
        make_hf_llava(tmp_path / "hf")
    start = "--init"
    if config == "small-vlm/stage2.yaml":  # adapters need a model
        import_hf(tmp_path / "hf", tmp_path / "megatron")
        start = f"--megatron-load-dir {tmp_path / 'megatron'}"
    places = f"{start} --tokenizer-load-dir {tmp_path / 'hf'} --data-path {shards} --save-dir {tmp_path} --name r"
    flags = f"{ON_CPUS[config]} --config examples/{config} {places}"
    written = yaml.safe_load((EXAMPLES / config).read_text(encoding="utf-8"))
    precision = written["training"].get("precision", "fp32")  # fp32 is what a machine without GPUs chooses
    assert resolved(flags.split(), capsys)["training"]["precision"] == precision


@pytest.mark.parametrize("command", ALL, ids=lambda x: f"{x.recipe} {x.name}")
def test_command_parses(command: Command, tmp_path: Path) -> None:
    flags = command.flags({"DATA": tmp_path / "data", "WORK": tmp_path / "work"})
    if command.name == RUN:
        assert parse_command_line(flags, "run.py").load().name
    elif command.name.startswith("examples/"):
        own_script(ROOT / command.name).parser().parse_args(flags)
    else:
        parser_of(command.name).parse_args(flags)


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m llava_mcore NAME`."""
    module = importlib.import_module(f"llava_mcore.cli.{COMMANDS[name].file}")
    parser: argparse.ArgumentParser = module.parser()
    return parser


def own_script(path: Path) -> ModuleType:
    """Import a script of an example."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_exported_adapter_answers_as_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """answer.py, which is transformers and PEFT alone, says what PEFT's model says to training's own prompt."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    make_hf_llava(tmp_path / "hf")
    torch.manual_seed(0)
    lora = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(LlavaForConditionalGeneration.from_pretrained(tmp_path / "hf"), lora)
    adapted.save_pretrained(tmp_path / "adapter")
    AutoProcessor.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoProcessor.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "merged")
    (tmp_path / "photo.jpg").write_bytes(jpeg(3))
    asked = ["--image", str(tmp_path / "photo.jpg"), "--question", "Which digit is shown?", "--max-new-tokens", "8"]
    folders = ["--hf-dir", str(tmp_path / "hf"), "--adapter", str(tmp_path / "adapter")]
    answers = []
    for run, given in (
        (own_script(EXAMPLES / "lora-one-gpu" / "answer.py").main, folders),
        (generate.main, ["--hf-dir", str(tmp_path / "merged")]),
        (generate.main, ["--hf-dir", str(tmp_path / "hf")]),
    ):
        capsys.readouterr()
        run([*given, *asked])
        answers.append(capsys.readouterr().out.strip())
    assert answers[0] == answers[1] != answers[2] and answers[0]


def test_every_recipe_goes_from_data_to_an_answer() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/README.md")} == MODELS.keys()
    for recipe in MODELS:
        names = {x.name for x in commands(recipe)}
        assert {"prepare", "check", "import-hf", RUN, "export-hf", "generate"} <= names, recipe


@pytest.mark.parametrize("name", TABLES)
def test_figures_are_those_of_the_results(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert with_table(text, TABLES[name]()) == text, "run python -m benchmarks.marked_tables"


def test_figures_are_in_generated_tables_only() -> None:
    """A figure of speed or memory outside of them would not be checked."""
    for path in EXAMPLES.glob("*/README.md"):
        text = re.sub(r"<!-- measured -->.*?<!-- /measured -->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.findall(r"\d[\d,.]* (?:tokens/s|GiB|TFLOP)", text), path


def test_links_of_the_recipes() -> None:
    """Every relative link leads to a file."""
    for path in EXAMPLES.glob("*/README.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), (path, target)
