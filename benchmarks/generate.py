"""Tokens per second of answers from a Megatron checkpoint: with the key/value cache, and recomputing the prefix.

    python -m benchmarks.generate [--hf-dir DIR] [--num-new 64] [--device cpu]

Without --hf-dir a random model of SmolLM2-135M's sizes is created, with a CLIP tower of 256 patches. Answers never end
early. Prints a table in Markdown; the tokens of all rows are checked to be the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, PretrainedConfig

from llava_mcore.data.samples import Batch
from llava_mcore.inference.generation.cache import cached_rows
from llava_mcore.inference.generation.generate import generate, most_probable
from llava_mcore.inference.generation.prompt import Prompt
from llava_mcore.inference.generation.settings import Settings, TokenSampling, read_settings
from llava_mcore.inference.generation.stages import CachedModel
from llava_mcore.media.batch_fields import FEATURE_POSITIONS, NO_SCALE, PIXEL_SCALE, PIXEL_VALUES
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of, features_per_tile
from llava_mcore.models.configs import ModelOptions
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.vision.features import image_side
from llava_mcore.parallel.groups import Groups, join_alone
from llava_mcore.parallel.share import share_step

IMAGE_TOKEN = 3


def random_config() -> PretrainedConfig:
    """Return the sizes of SmolLM2-135M, and a tower of 12 layers, 384 wide."""
    text = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    vision = CLIPVisionConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=6,
        image_size=224,
        patch_size=14,
    )
    return LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        image_seq_length=256,
        tie_word_embeddings=True,
    )


def make_prompt(hf: PretrainedConfig, seed: int, num_text: int) -> Prompt:
    """Return a prompt with one random image."""
    generator = torch.Generator().manual_seed(seed)
    n, side = features_per_tile(hf), image_side(hf.vision_config)
    text = torch.randint(10, hf.text_config.vocab_size, (num_text,), generator=generator)
    ids = torch.cat([text[:4], torch.full((n,), hf.image_token_id), text[4:]])[None]
    media = {
        PIXEL_VALUES: torch.randn(1, 3, side, side, generator=generator),
        PIXEL_SCALE: NO_SCALE,
        FEATURE_POSITIONS: torch.arange(n) + 4,
    }
    length = ids.shape[1]
    batch = Batch(
        input_ids=ids,
        labels=torch.zeros_like(ids),
        loss_mask=torch.zeros(ids.shape),
        position_ids=torch.arange(length)[None],
        media=media,
        sample_keys=[""],
        num_tokens=length,
    )
    return Prompt(batch, length, length)


def recompute(model: VisionLanguageModel, groups: Groups, prompt: Prompt, num_new: int) -> list[int]:
    """Return the best tokens, each from a pass over everything before it, with the logits of its last token only."""
    ids, tokens = prompt.batch.input_ids, []
    fields = architecture_of(model.hf).fields
    with torch.no_grad(), cached_rows([model], 1, groups.device) as rows:
        whole = CachedModel([model], groups, rows)
        for _ in range(num_new):
            length = ids.shape[1]
            text = {"input_ids": ids, "labels": ids, "loss_mask": torch.zeros(ids.shape)}
            again = dataclasses.replace(prompt.batch, **text, position_ids=torch.arange(length)[None])
            (batch,) = share_step(groups, [again], 1, fields)
            logits = whole.read_prompt(batch, length, 0)
            assert logits is not None
            tokens += most_probable(logits, groups.tensor_parallel).tolist()
            ids = torch.cat([ids, ids.new_tensor([[tokens[-1]]])], dim=1)
    return tokens


def timed(
    model: VisionLanguageModel, groups: Groups, prompts: list[Prompt], settings: Settings, num_rows: int
) -> tuple[float, list[list[int]]]:
    """Return seconds and tokens of all prompts with the cache."""
    start = time.perf_counter()
    fields = architecture_of(model.hf).fields
    found = {x.index: x.tokens for x in generate([model], groups, iter(prompts), settings, fields, num_rows=num_rows)}
    return time.perf_counter() - start, [found[number] for number in range(len(prompts))]


def main() -> None:
    """Measure and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hf-dir", type=Path, help="take the sizes of this folder's config.json")
    p.add_argument("--num-new", type=int, default=64, help="tokens of an answer")
    p.add_argument("--num-text", type=int, default=44, help="tokens of a prompt beside its image")
    p.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8], help="numbers of prompts at the same time")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args()
    device = torch.device(args.device)
    hf = random_config() if args.hf_dir is None else load_hf_config(args.hf_dir)
    groups = dataclasses.replace(join_alone(), device=device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    options = ModelOptions(params_dtype=dtype, on_cpu=args.device == "cpu")
    model = VisionLanguageModel(hf, options).to(device=device, dtype=dtype).eval()
    with tempfile.TemporaryDirectory() as folder:
        settings = read_settings(Path(folder), hf, None, max_new_tokens=args.num_new, sampling=TokenSampling())
    settings = dataclasses.replace(settings, end_ids=frozenset())
    prompts = [make_prompt(hf, seed, args.num_text) for seed in range(max(args.rows))]
    timed(model, groups, prompts[:1], dataclasses.replace(settings, max_new_tokens=2), 1)  # warm up
    recompute(model, groups, prompts[0], 1)
    start = time.perf_counter()
    expected = recompute(model, groups, prompts[0], args.num_new)
    plain = args.num_new / (time.perf_counter() - start)
    print(f"{args.device}, {dtype}, prompts of {prompts[0].length} tokens, answers of {args.num_new}")
    print("\n| | tokens/s | times |\n|---|---|---|")
    print(f"| recomputing the prefix | {plain:.1f} | 1 |")
    for num_rows in args.rows:
        seconds, tokens = timed(model, groups, prompts[:num_rows], settings, num_rows)
        if args.device == "cpu" and tokens[0] != expected:
            raise SystemExit("the cache changes the answer")
        speed = num_rows * args.num_new / seconds
        print(
            f"| cache, {num_rows} prompt{'s' if num_rows > 1 else ''} at a time | {speed:.1f} | {speed / plain:.1f} |"
        )


if __name__ == "__main__":
    main()
