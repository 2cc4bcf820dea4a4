"""The register of model classes: a row for each Hugging Face class that can be imported, trained and exported.

Flags, rules, `ARCHITECTURES` (models/architectures/registry.py), the classes that `build` writes
(build/architectures/registry.py) and the table in README.md follow from it. It needs no torch: --help and configuration
files name classes before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class ModelClass:
    """One class of transformers.

    Attributes:
        name: its name there.
        architecture: file and class in `models/architectures/`.
        folder: file and class in `build/architectures/`; None: `build` does not write it.
    """

    name: str
    architecture: str
    folder: str | None = None


MODEL_CLASSES = {
    "llava": ModelClass("LlavaForConditionalGeneration", "llava.Llava", "llava.LlavaFolder"),
    "llava_next": ModelClass("LlavaNextForConditionalGeneration", "llava_next.LlavaNext", "grids.NextFolder"),
    "llava_onevision": ModelClass(
        "LlavaOnevisionForConditionalGeneration", "llava_onevision.LlavaOnevision", "grids.OnevisionFolder"
    ),
    "internvl": ModelClass("InternVLForConditionalGeneration", "internvl.InternVl", "internvl.InternVlFolder"),
    "idefics2": ModelClass("Idefics2ForConditionalGeneration", "idefics2.Idefics2", "idefics2.Idefics2Folder"),
    "idefics3": ModelClass("Idefics3ForConditionalGeneration", "idefics3.Idefics3", "idefics3.Idefics3Folder"),
    "smolvlm": ModelClass("SmolVLMForConditionalGeneration", "idefics3.SmolVlm", "idefics3.SmolVlmFolder"),
    "qwen2_vl": ModelClass("Qwen2VLForConditionalGeneration", "qwen_vl.Qwen2Vl"),
    "qwen2_5_vl": ModelClass("Qwen2_5_VLForConditionalGeneration", "qwen_vl.Qwen25Vl"),
    "qwen3_vl": ModelClass("Qwen3VLForConditionalGeneration", "qwen_vl.Qwen3Vl"),
    "qwen3_vl_moe": ModelClass("Qwen3VLMoeForConditionalGeneration", "qwen_vl.Qwen3VlMoe"),
    "qwen3_5": ModelClass("Qwen3_5ForConditionalGeneration", "qwen_vl.Qwen35"),
    "qwen3_5_moe": ModelClass("Qwen3_5MoeForConditionalGeneration", "qwen_vl.Qwen35Moe"),
    "mllama": ModelClass("MllamaForConditionalGeneration", "mllama.Mllama"),
    "qwen2_audio": ModelClass("Qwen2AudioForConditionalGeneration", "qwen2_audio.Qwen2Audio"),
}
"""By model_type. `build` takes the first class that has the connector asked for."""


def instance(package: str, path: str) -> Any:
    """Return an object of a row's class. `path`: its file in the package, and its name."""
    file, _, name = path.partition(".")
    return getattr(import_module(f"{package}.{file}"), name)()
