"""The commands of the recipes in examples/, and folders for them that have the published sizes but no weights."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.shapes import make_hf_folder
from llava_mcore.build.tiny.classes import write_tiny
from llava_mcore.convert.import_hf import import_hf
from tests.helpers.commands import ROOT
from tests.helpers.tiny_hf import make_hf_llava

EXAMPLES = ROOT / "examples"
TINY = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096}
MODELS: dict[str, tuple[str, int] | str | None] = {
    "llava-1.5-7b": ("llava-1.5-7b", 4096),
    "llava-jp-1.8b": ("llava-jp-1.8b", 4096),
    "llava-onevision-7b": ("llava-onevision-7b", 32768),
    "qwen2.5-vl-7b": ("qwen2.5-vl-7b", 128_000),
    "lora-one-gpu": None,
    "qwen2.5-vl-lora": "qwen2_5_vl",
}
"""Recipe -> shape of `benchmarks.shapes` and the number of its positions. None, or a class: a tiny model with weights,
because an adapter belongs to a checkpoint."""


@dataclass(frozen=True)
class Command:
    """A command of a recipe's README: its program and flags, variables still in them."""

    recipe: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """`python -m llava_mcore NAME`, or the path of a script."""
        return self.words[3] if self.words[1:3] == ("-m", "llava_mcore") else self.words[1]

    def flags(self, places: dict[str, Path]) -> list[str]:
        """Return its flags with folders for $DATA and $WORK."""
        given = self.words[4:] if self.words[1] == "-m" else self.words[2:]
        return [re.sub(r"\$(\w+)", lambda x: str(places[x[1]]), word) for word in given]


def commands(recipe: str) -> list[Command]:
    """Return all commands in a README's blocks of shell that start with python."""
    text = (EXAMPLES / recipe / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```shell\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [Command(recipe, tuple(shlex.split(line))) for line in lines if line.startswith("python ")]


def make_places(recipe: str, root: Path, shards: Path) -> dict[str, Path]:
    """Return $DATA and $WORK, with all folders that the recipe's training commands read."""
    places = {"DATA": root / "data", "WORK": root / "work"}
    model, checkpoint = _make_model(recipe, root)
    for command in commands(recipe):
        if command.name == "train":
            given = dict(pairwise(command.flags(places)))
            _copy(model, Path(given["--tokenizer-load-dir"]))
            _copy(checkpoint, Path(given["--megatron-load-dir"]))
            _make_data(shards, Path(given["--data-path"]))
    return places


def _make_model(recipe: str, root: Path) -> tuple[Path, Path]:
    """Return a Hugging Face folder and a checkpoint of it; without weights, unless the recipe trains an adapter."""
    model, checkpoint = root / "model", root / "checkpoint"
    published = MODELS[recipe]
    if published is None or isinstance(published, str):
        if published is None:
            make_hf_llava(model, text_overrides=TINY)
        else:
            write_tiny(published, model, seed=0)
        import_hf(model, checkpoint)
        return model, checkpoint
    make_hf_folder(model, published[0], seq_length=published[1])
    _copy(model, checkpoint / "iter_0000000" / "hf")
    (checkpoint / "iter_0000000" / "metadata.json").write_text("{}")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("0\n")
    return model, checkpoint


def _make_data(shards: Path, data: Path) -> None:
    """Copy shards to a folder, or beside a blend that is made of them."""
    _copy(shards, data.parent if data.suffix else data)
    if data.suffix:
        data.write_text(f"{BLEND}      - {{weight: 1, path: .}}\n")


BLEND = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"


def _copy(source: Path, target: Path) -> None:
    if not target.exists():
        shutil.copytree(source, target)
