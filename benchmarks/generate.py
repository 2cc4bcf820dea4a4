"""Tokens per second of answers from a Megatron checkpoint: with the key/value cache, and recomputing the prefix.

    python -m benchmarks.generate [--hf-dir DIR] [--num-new 64] [--device cpu] [--transformers]
    torchrun --nproc-per-node 2 -m benchmarks.generate --shape llava-1.5-7b    # tensor parallel over two GPUs

Without --hf-dir and --shape a random model of SmolLM2-135M's sizes is created, with a CLIP tower of 256 patches.
Answers never end early. Prints a table in Markdown; on a CPU the tokens with and without the cache are checked to be
the same. With --transformers also the `generate` of Hugging Face's class, with random weights of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from pathlib import Path

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
)

from benchmarks.shapes import SHAPES, make_hf_folder
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
from llava_mcore.parallel.groups import Groups, initialize, join_alone, shut_down
from llava_mcore.parallel.random import seed_everything
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
    model: VisionLanguageModel,
    groups: Groups,
    prompts: list[Prompt],
    settings: Settings,
    num_rows: int,
    *,
    graphs: bool = False,
) -> tuple[float, list[list[int]]]:
    """Return seconds and tokens of all prompts with the cache."""
    start = time.perf_counter()
    fields = architecture_of(model.hf).fields
    answers = generate([model], groups, iter(prompts), settings, fields, num_rows=num_rows, graphs=graphs)
    found = {x.index: x.tokens for x in answers}
    return time.perf_counter() - start, [found[number] for number in range(len(prompts))]


def by_transformers(
    hf: PretrainedConfig, prompts: list[Prompt], num_new: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the seconds that Hugging Face's class needs for the prompts in one batch."""
    torch.manual_seed(0)
    with device:
        model = LlavaForConditionalGeneration._from_config(hf, dtype=dtype).eval()
    ids = torch.cat([prompt.batch.input_ids for prompt in prompts]).to(device)
    pixels = torch.cat([prompt.batch.media[PIXEL_VALUES] for prompt in prompts]).to(device=device, dtype=dtype)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}

    def answer(length: int) -> None:
        new = {"min_new_tokens": length, "max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
        assert model.generate(**inputs, **new).shape[1] == ids.shape[1] + length

    answer(2)  # warm up
    start = time.perf_counter()
    answer(num_new)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of_llava = [name for name, shape in SHAPES.items() if shape.kind == "llava"]
    p.add_argument("--hf-dir", type=Path, help="take the sizes of this folder's config.json")
    p.add_argument("--shape", choices=of_llava, help="take these sizes")
    p.add_argument("--num-new", type=int, default=64, help="tokens of an answer")
    p.add_argument("--num-text", type=int, default=44, help="tokens of a prompt beside its image")
    p.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8], help="numbers of prompts at the same time")
    p.add_argument("--transformers", action="store_true", help="also measure Hugging Face's class")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.shape is not None:
            make_hf_folder(Path(folder), args.shape, seq_length=4096)
        place = Path(folder) if args.shape is not None else args.hf_dir
        hf = random_config() if place is None else load_hf_config(place)
        settings = read_settings(Path(folder), hf, None, max_new_tokens=args.num_new, sampling=TokenSampling())
    settings = dataclasses.replace(settings, end_ids=frozenset())
    measure(args, hf, settings)


def measure(args: argparse.Namespace, hf: PretrainedConfig, settings: Settings) -> None:
    """Print the table, on the first of torchrun's processes if there are several."""
    groups, dtype = groups_on(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
    if groups.tp_size > 1:
        seed_everything(0)  # whole parameters are the same on all ranks, parts of matrices are not
    options = ModelOptions(params_dtype=dtype, on_cpu=args.device == "cpu", tensor_model_parallel_size=groups.tp_size)
    model = VisionLanguageModel(hf, options).to(device=groups.device, dtype=dtype).eval()
    prompts = [make_prompt(hf, seed, args.num_text) for seed in range(max(args.rows))]

    # Warm up, then without the cache.
    timed(model, groups, prompts[:1], dataclasses.replace(settings, max_new_tokens=2), 1)
    recompute(model, groups, prompts[0], 1)
    start = time.perf_counter()
    expected = recompute(model, groups, prompts[0], args.num_new)
    plain = args.num_new / (time.perf_counter() - start)
    lines = [f"{args.device}, {dtype}, tp {groups.tp_size}, prompts of {prompts[0].length} tokens, "]
    lines[0] += f"answers of {args.num_new}\n"
    lines += ["| | tokens/s | times | ms per prompt | ms per pass |", "|---|---|---|---|---|"]
    lines.append(f"| recomputing the prefix | {plain:.1f} | 1 | | |")

    # With it, some prompts at a time, and transformers beside it.
    for num_rows in args.rows:
        for graphs in (False, True) if args.device == "cuda" else (False,):
            run = measured(model, groups, prompts[:num_rows], settings, graphs=graphs)
            if args.device == "cpu" and run.tokens[0] != expected:
                raise SystemExit("the cache changes the answer")
            name = f"cache{' and CUDA graphs' if graphs else ''}, {prompts_of(num_rows)}"
            speed, parts = num_rows * args.num_new / run.seconds, f"{run.ms_per_prompt:.1f} | {run.ms_per_pass:.1f}"
            lines.append(f"| {name} | {speed:.1f} | {speed / plain:.1f} | {parts} |")
    if args.transformers and groups.rank == 0:
        del model
        for num_rows in args.rows:
            seconds = by_transformers(hf, prompts[:num_rows], args.num_new, groups.device, dtype)
            speed = num_rows * args.num_new / seconds
            lines.append(f"| transformers, {prompts_of(num_rows)} | {speed:.1f} | {speed / plain:.1f} | | |")
    if groups.rank == 0:
        print("\n".join(lines))
    shut_down()


@dataclasses.dataclass(frozen=True)
class Measured:
    """The time of answering all prompts at once, the tokens of each answer, and the time of a prompt and of a pass of
    single tokens."""

    seconds: float
    tokens: list[list[int]]
    ms_per_prompt: float
    ms_per_pass: float


def measured(
    model: VisionLanguageModel, groups: Groups, prompts: list[Prompt], settings: Settings, *, graphs: bool
) -> Measured:
    """Answer all prompts at once. Answers of one token need no pass, so their time is that of the prompts; the first
    pass with graphs and their capture count as passes."""
    count, num_new = len(prompts), settings.max_new_tokens
    short = dataclasses.replace(settings, max_new_tokens=1)
    of_prompts, _ = timed(model, groups, prompts, short, count, graphs=graphs)
    seconds, tokens = timed(model, groups, prompts, settings, count, graphs=graphs)
    of_passes = (seconds - of_prompts) / max(num_new - 1, 1)
    return Measured(seconds, tokens, 1e3 * of_prompts / count, 1e3 * of_passes)


def groups_on(device: str) -> Groups:
    """Join torchrun's processes, which divide the model's matrices, or run alone."""
    if "WORLD_SIZE" not in os.environ:
        return dataclasses.replace(join_alone(), device=torch.device(device))
    return initialize(
        backend="nccl" if device == "cuda" else "gloo",
        tensor_model_parallel_size=int(os.environ["WORLD_SIZE"]),
        pipeline_model_parallel_size=1,
    )


def prompts_of(number: int) -> str:
    """Return how many prompts are answered at a time, in words."""
    return f"{number} prompt{'s' if number > 1 else ''} at a time"


if __name__ == "__main__":
    main()
