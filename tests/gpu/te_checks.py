"""What the ranks of the Transformer Engine tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (before megatron.core)

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from llava_mcore.checkpoint.layout import latest_checkpoint
from llava_mcore.convert.logits_worker import given_media
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import whole_names
from llava_mcore.parallel.batch import longest_media
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.step import forward_backward
from tests.helpers.batches import FakeLoader, PackedLoader
from tests.parallel.checks import join, load_model, logits
from tests.parallel.training_checks import GLOBAL_BATCH, MIXED, TrainingRun, make_trainer, run_all, run_config
from tests.parallel.validation_checks import train_and_validate

BF16 = {"training.precision": "bf16", "training.train_iters": 8}
TE = {"model.transformer_impl": "transformer_engine"}
FP8 = {"training.fp8": True, "training.micro_batch_size": 8, **TE}  # 8 x 48 tokens: a multiple of 128
RECIPES = ("delayed", "tensorwise", "blockwise")


def bf16_logits(cases: list[dict[str, Any]]) -> list[dict[str, dict[str, torch.Tensor | None]]]:
    """Return each case's logits from both kinds of layers, in bf16, of its samples padded and packed."""
    groups = join(1, 1)
    found = []
    for case in cases:
        checkpoint = latest_checkpoint(Path(case["megatron"]))[0]
        both = {}
        for impl in ("local", "transformer_engine"):
            model = load_model(groups, checkpoint, params_dtype=torch.bfloat16, transformer_impl=impl).bfloat16()
            inputs = case["inputs"] | {"pixel_values": case["inputs"]["pixel_values"].bfloat16()}
            with torch.no_grad():
                both[impl] = {"padded": logits(groups, model, inputs), "packed": packed_logits(model, inputs).cpu()}
        found.append(both)
    return found


def tower_gradients(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return for each case how far a tower's gradients are from torch's layers' in fp32, relative, of one pack.

    By the kind of layers, in bf16.
    """
    groups = join(1, 1)
    kinds = (("truth", "local", torch.float32), *((x, x, torch.bfloat16) for x in ("local", "transformer_engine")))
    found = []
    for case in cases:
        checkpoint = latest_checkpoint(Path(case["megatron"]))[0]
        gradients = {}
        for kind, impl, dtype in kinds:
            model = load_model(groups, checkpoint, params_dtype=dtype, transformer_impl=impl).to(dtype)
            inputs = case["inputs"] | {"pixel_values": case["inputs"]["pixel_values"].to(dtype)}
            packed_logits(model, inputs).float().square().mean().backward()
            named = sorted(whole_names(model).items())
            parts = [p.grad.float().flatten() for name, p in named if p.grad is not None and "vision" in name]
            gradients[kind] = torch.cat(parts)
        truth = gradients.pop("truth")
        found.append({kind: ((x - truth).norm() / truth.norm()).item() for kind, x in gradients.items()})
    return found


def packed_logits(model: VisionLanguageModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits [b, s, vocabulary] of samples that the model reads as one packed row."""
    device = torch.device("cuda")
    ids = inputs["input_ids"].to(device)
    bounds = torch.arange(0, ids.numel() + 1, ids.shape[1], dtype=torch.int32, device=device)
    longest = ids.shape[1]
    params = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    positions = inputs.get("position_ids", torch.arange(longest).expand(ids.shape)).to(device)
    positions = positions.reshape(*positions.shape[:-2], 1, -1)
    media = {name: x.to(device) for name, x in given_media(inputs).items()}
    most = longest_media(media)
    out = model(ids.reshape(1, -1), positions, media, packed_seq_params=params, max_media_seqlen=most)
    return out.view(*ids.shape, -1)


def with_and_without_validation(material: dict[str, str], save_dir: str) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return losses and gradient norms of training with and without validation between the steps."""
    groups = join(1, 1)
    bf16 = {"training.precision": "bf16", **TE, "data.path": material["data"], "data.num_workers": 0}
    distributed = {"parallel.use_distributed_optimizer": True}
    kinds: dict[str, dict[str, Any]] = {"bf16": distributed, "packed": {"data.packing": True}}
    kinds |= {recipe: FP8 | {"training.fp8_recipe": recipe} for recipe in RECIPES}
    found = {}
    for name, flags in kinds.items():
        given = bf16 | flags | {"data.seq_length": 128}
        validates = given | {"validation.eval_interval": 1}
        arguments = (groups, material["checkpoint"], save_dir)
        both = [train_and_validate(*arguments, used, 6) for used in (given, validates)]
        assert not both[0]["validations"] and len(both[1]["validations"]) == 7
        found[name] = (both[0]["losses"], both[1]["losses"])
    return found


def gradient_squares(tp: int, save_dir: str, kinds: dict[str, TrainingRun]) -> dict[str, Any]:
    """Return for each kind the squared norm of every gradient on this rank, and whether ranks hold parts of it."""
    groups = join(tp, 1)
    found = {}
    for kind, run in kinds.items():
        trainer = make_trainer(groups, run_config(tp, 1, run.checkpoint, save_dir, **(BF16 | run.flags)))
        opened = PackedLoader if run.packed else FakeLoader
        loader = opened(trainer.hf, micro_batch_size=2, dp_rank=0, dp_size=1, text_only=run.text_only)
        number = GLOBAL_BATCH // 2
        batches, *_ = fetch_step(groups, loader if groups.loads_data else None, number, SkipBudget(0.0), trainer.fields)
        for chunk in trainer.chunks:
            chunk.zero_grad_buffer()
        forward_backward(trainer.chunks, batches)
        found[kind] = {
            name: (p.main_grad.double().square().sum().item(), bool(vars(p).get("tensor_model_parallel")))
            for name, p in whole_names(trainer.models[0]).items()
            if p.requires_grad
        }
    return found


def torchs_losses(checkpoint: str, save_dir: str) -> list[float]:
    """Train with torch's layers on one GPU."""
    return run_all(join(1, 1), {"torch": TrainingRun(checkpoint, MIXED, BF16)}, save_dir)["torch"]["loss"]


def is_coarse(run: TrainingRun) -> bool:
    """Return whether a run multiplies or stores matrices in 8 bits."""
    return run.flags.get("training.fp8", False) or run.flags.get("adapter.quantize") == "fp8"


def curves(tp: int, pp: int, checkpoint: str, save_dir: str, fp8: bool = True) -> dict[str, dict[str, list[float]]]:
    """Train `curve_runs` at one layout."""
    return run_all(join(tp, pp), curve_runs(checkpoint, fp8=fp8), save_dir)


def curve_runs(checkpoint: str, *, fp8: bool) -> dict[str, TrainingRun]:
    """Return runs with torch's layers, then Transformer Engine's, padded, packed, and in every FP8 recipe."""
    distributed = {"parallel.use_distributed_optimizer": True}
    fp16 = {"training.precision": "fp16", "training.loss_scale": 128.0}
    runs = {
        "local": TrainingRun(checkpoint, MIXED, BF16),
        "te": TrainingRun(checkpoint, MIXED, BF16 | TE),
        "packed te": TrainingRun(checkpoint, MIXED, BF16 | TE, packed=True),
        "distributed": TrainingRun(checkpoint, MIXED, BF16 | TE | distributed),
        "text only": TrainingRun(checkpoint, range(GLOBAL_BATCH), BF16 | TE),
        "fp16": TrainingRun(checkpoint, MIXED, BF16 | TE | fp16),
    }
    if fp8:
        for recipe in RECIPES:
            runs[recipe] = TrainingRun(checkpoint, MIXED, BF16 | FP8 | {"training.fp8_recipe": recipe})
        runs["delayed, e4m3"] = TrainingRun(checkpoint, MIXED, BF16 | FP8 | {"training.fp8_format": "e4m3"})
        ends = {"training.fp8_first_layers_bf16": 1, "training.fp8_last_layers_bf16": 1}
        flags = {"training.fp8_recipe": "tensorwise", **ends}
        runs["tensorwise, ends in bf16"] = TrainingRun(checkpoint, MIXED, BF16 | FP8 | flags)
    return runs


def adapters(tp: int, checkpoint: str, save_dir: str, nf4: bool) -> dict[str, dict[str, list[float]]]:
    """Train `adapter_runs` on so many tensor-parallel ranks."""
    return run_all(join(tp, 1), adapter_runs(tp, checkpoint, nf4=nf4), save_dir)


def adapter_runs(tp: int, checkpoint: str, *, nf4: bool) -> dict[str, TrainingRun]:
    """Return runs of adapters on torch's layers and on Transformer Engine's, whose norms are inside their matrices.

    nf4: only the runs on matrices of 4 bits, which need bitsandbytes; otherwise all other runs.
    """
    lora = BF16 | {
        "adapter.r": 8,
        "adapter.vision_r": 4,
        "adapter.projection_r": 4,
        "model.freeze_vision_model": True,
        "parallel.sequence_parallel": tp > 1,
        "parallel.use_distributed_optimizer": True,
    }
    if nf4:
        quantized = lora | {"adapter.quantize": "nf4"}
        return {
            "local": TrainingRun(checkpoint, MIXED, quantized),
            "te": TrainingRun(checkpoint, MIXED, quantized | TE),
        }
    dora = lora | {"adapter.dora": True}
    runs = {
        "local": TrainingRun(checkpoint, MIXED, lora),
        "te": TrainingRun(checkpoint, MIXED, lora | TE),
        "packed te": TrainingRun(checkpoint, MIXED, lora | TE, packed=True),
        "recomputed te": TrainingRun(checkpoint, MIXED, lora | TE | {"model.recompute": "full"}),
        "local dora": TrainingRun(checkpoint, MIXED, dora),
        "te dora": TrainingRun(checkpoint, MIXED, dora | TE),
    }
    if tp == 1:  # of two ranks each would hold half of one of the blocks of 128 values
        runs["te fp8 weights"] = TrainingRun(checkpoint, MIXED, lora | TE | {"adapter.quantize": "fp8"})
    for recipe in RECIPES:
        runs[recipe] = TrainingRun(checkpoint, MIXED, lora | FP8 | {"training.fp8_recipe": recipe})
    for recipe in ("delayed", "tensorwise"):
        only_fp8 = {"training.fp8_recipe": recipe, "adapter.quantize": "fp8"}
        runs[f"{recipe}, no 16-bit copy"] = TrainingRun(checkpoint, MIXED, lora | FP8 | only_fp8)
    return runs
