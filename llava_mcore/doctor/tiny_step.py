"""The processes of the self-test: one training step of a tiny random LLaVA beside plain transformers.

Every rank builds the same Hugging Face model from a seed, computes loss and gradients of the global batch with it in
fp32 on the CPU, and copies its weights to the parallel model. Then all ranks train one step, and each compares what it
holds of the gradients.

b: samples, s: tokens.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from llava_mcore import log
from llava_mcore.checkpoint.choose_start import StartPoint
from llava_mcore.config.load import load_run_config
from llava_mcore.doctor.self_test import Comparison, SelfTest
from llava_mcore.media.batch_fields import FEATURE_POSITIONS, NO_SCALE, PIXEL_SCALE, PIXEL_VALUES
from llava_mcore.models.language.decoder import padded_vocab_size
from llava_mcore.models.model_table import detect_names, mapping_table
from llava_mcore.models.trainable import whole_names
from llava_mcore.parallel.batch import MicroBatch
from llava_mcore.parallel.groups import Groups, gather_to_first, initialize, shut_down
from llava_mcore.parallel.random import seed_everything
from llava_mcore.parallel.share import SharedStep
from llava_mcore.processes.local_world import enter, run_world
from llava_mcore.training.setup import Trainer, build_trainer
from llava_mcore.training.step import train_step

_SEED = 1
_LENGTH, _NUM_TRAINED = 48, 20
_SAMPLES_PER_RANK = 2
_IMAGE, _SIDE, _PATCH = 4, 56, 14
_VOCAB = 400
_COLLECTIVE_SECONDS = 120
_REDUCED = 1 << 22

Implementation = Literal["local", "transformer_engine"]
LAYERS = {"local": "torch's layers", "transformer_engine": "Transformer Engine's layers"}
LIMITS = {"fp32": (1e-5, 1e-3), "bf16": (1e-2, 1e-1)}
"""Precision -> limits of the relative difference of the loss, and of each parameter's gradient."""


def main(num_processes: int, device: str, file: Path) -> None:
    """Run the self-test in a world of processes; write the result of rank 0 to a file."""
    log.quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="llava_mcore-") as name:
        _config().save_pretrained(name)
        run_world(run_rank, num_processes, device, Path(name), file, on_gpus=device == "cuda")


def run_rank(rank: int, num_processes: int, port: int, device: str, folder: Path, file: Path) -> None:
    """Train the steps on one rank, and sum numbers over all of them. folder: it has the model's config."""
    enter(rank, num_processes, port)
    log.quiet_libraries()
    logging.getLogger("llava_mcore").setLevel(logging.ERROR)  # counts of parameters, and the like
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    tp_size = 2 if num_processes % 2 == 0 else 1
    groups = initialize(
        backend="nccl" if device == "cuda" else "gloo",
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=1,
        timeout_seconds=_COLLECTIVE_SECONDS,
    )
    sums_right = _all_reduce_is_right(groups)
    runs: list[tuple[str, Implementation]] = [("fp32", "local")]
    if device == "cuda":
        runs.append(("bf16", "transformer_engine" if HAVE_TE else "local"))
    batch, reference = _global_batch(groups.dp_size), _HuggingFace.build()
    reference.run(batch)
    compared = [_compare(groups, reference, batch, folder, precision, impl) for precision, impl in runs]
    ranks = gather_to_first(groups, (sums_right, compared))
    if rank == 0:
        worst = [max(alike, key=lambda x: x.excess) for alike in zip(*(x for _, x in ranks), strict=True)]
        layout = f"tp {tp_size} x dp {groups.dp_size}"
        broken = [i for i, (is_right, _) in enumerate(ranks) if not is_right]
        file.write_text(json.dumps(asdict(SelfTest(device, num_processes, layout, broken, worst))), encoding="utf-8")
    shut_down()


def _all_reduce_is_right(groups: Groups) -> bool:
    """Return whether a sum over all ranks is the right one, in every element."""
    ramp = torch.arange(_REDUCED, device=groups.device) % 1000
    x = (ramp + groups.rank).float()
    dist.all_reduce(x)
    size = groups.world_size
    return bool((x == (ramp * size + size * (size - 1) // 2).float()).all())


def _config() -> LlavaConfig:
    """Return a LLaVA of CLIP and Llama with a few thousand weights per matrix."""
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        patch_size=_PATCH, image_size=_SIDE,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=_VOCAB,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=_IMAGE,
        image_token_index=_IMAGE,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=(_SIDE // _PATCH) ** 2,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class _TinyBatch:
    """Samples with one image each: ids, labels and mask [b, s], pixels [b, 3, h, w], positions of features."""

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    pixels: Tensor
    positions: Tensor

    def part(self, index: int, size: int) -> _TinyBatch:
        """Return `size` samples from `index * size`."""
        rows = slice(index * size, (index + 1) * size)
        positions = self.positions[: size * len(self.positions) // len(self.input_ids)]
        return _TinyBatch(self.input_ids[rows], self.labels[rows], self.loss_mask[rows], self.pixels[rows], positions)


def _global_batch(dp_size: int) -> _TinyBatch:
    """Return the same random samples on all ranks; of different samples different numbers of tokens are trained."""
    generator = torch.Generator().manual_seed(_SEED)
    b, n = dp_size * _SAMPLES_PER_RANK, (_SIDE // _PATCH) ** 2
    ids = torch.randint(_IMAGE + 1, _VOCAB, (b, _LENGTH), generator=generator)
    ids[:, 1 : 1 + n] = _IMAGE
    mask = torch.zeros(b, _LENGTH)
    for i in range(b):
        mask[i, -_NUM_TRAINED - 1 : -1 - i % 3] = 1
    positions = (torch.arange(b)[:, None] * _LENGTH + torch.arange(1, 1 + n)).flatten()
    pixels = torch.randn(b, 3, _SIDE, _SIDE, generator=generator)
    return _TinyBatch(ids, torch.roll(ids, -1, 1), mask, pixels, positions)


@dataclass
class _HuggingFace:
    """transformers' model in fp32 on the CPU, and the loss of a batch once it has run."""

    model: LlavaForConditionalGeneration
    loss: float = 0.0

    @classmethod
    def build(cls) -> _HuggingFace:
        """Build the same random model in every process; biases and norms are random too, so that a swap shows."""
        torch.manual_seed(_SEED)
        model = LlavaForConditionalGeneration(_config()).float().train()
        generator = torch.Generator().manual_seed(_SEED)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                noise = torch.randn(parameter.shape, generator=generator)
                is_norm = "norm" in name and name.endswith("weight")
                weights = 1 + 0.1 * noise if is_norm else 0.08 * noise
                parameter.copy_(weights.bfloat16())  # so that weights are the same in both precisions
        return cls(model)

    def run(self, batch: _TinyBatch) -> None:
        """Compute the mean loss of the trained tokens, and its gradients."""
        logits = self.model(input_ids=batch.input_ids, pixel_values=batch.pixels).logits
        losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        loss = (losses * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
        loss.backward()
        self.loss = loss.item()

    def weights(self) -> dict[str, Tensor]:
        return {name: x.detach() for name, x in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in self.model.named_parameters()}


def _compare(
    groups: Groups,
    reference: _HuggingFace,
    batch: _TinyBatch,
    folder: Path,
    precision: str,
    impl: Implementation,
) -> Comparison:
    """Train one step from transformers' weights, and compare loss and gradients; a collective call."""
    # A trainer with the same weights as the model of transformers.
    trainer = _trainer(groups, folder, precision, impl)
    expected = _parts(groups, reference.weights())
    with torch.no_grad():
        for name, parameter in whole_names(trainer.models[0]).items():
            parameter.copy_(expected[name])
    trainer.optimizer.reload_model_params()  # the fp32 copies of lower precision
    # One step, and the gradients that it has left.
    step = _shared_step(groups, batch)
    result = train_step(
        groups, trainer.chunks, trainer.optimizer, trainer.scheduler, step, len(batch.input_ids)
    ).result()
    worst, difference = _largest_difference(trainer, _parts(groups, reference.gradients()))
    return Comparison(
        name=f"{precision}, {LAYERS[impl]}",
        loss=result.loss,
        expected_loss=reference.loss,
        loss_limit=LIMITS[precision][0],
        parameter=worst,
        gradient_difference=difference,
        gradient_limit=LIMITS[precision][1],
        updated=result.updated,
    )


def _trainer(groups: Groups, folder: Path, precision: str, impl: Implementation) -> Trainer:
    flags: dict[str, Any] = {
        "parallel.tensor_model_parallel_size": groups.tp_size,
        "parallel.backend": "nccl" if groups.device.type == "cuda" else "gloo",
        "training.precision": precision,
        "training.train_iters": 1,
        "training.micro_batch_size": _SAMPLES_PER_RANK,
        "training.global_batch_size": _SAMPLES_PER_RANK * groups.dp_size,
        "model.transformer_impl": impl,
        "model.freeze_vision_model": False,
        "optimizer.clip_grad": 0.0,  # gradients are compared after the update, which would scale them
    }
    run = load_run_config(None, [], flags)
    seed_everything(_SEED)
    return build_trainer(run, groups, StartPoint("init", None, 0, folder))


def _parts(groups: Groups, hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of every Megatron tensor, of weights or gradients under Hugging Face's names."""
    config = _config()
    rows = padded_vocab_size(_VOCAB, divisible_by=128, tensor_model_parallel_size=groups.tp_size)
    names = detect_names(config, hf, source="the self-test's model")
    table = mapping_table(config, names, hf_tensors=hf, padded_vocab_size=rows)
    return {
        name: entry.shard.split(entry.to_megatron(hf), groups.tp_size)[groups.tp_rank]
        for name, entry in table.entries.items()
    }


def _shared_step(groups: Groups, batch: _TinyBatch) -> SharedStep:
    """Return this replica's samples as the only micro-batch of a step."""
    local = batch.part(groups.dp_rank, _SAMPLES_PER_RANK)
    device = groups.device
    media = {PIXEL_VALUES: local.pixels, PIXEL_SCALE: NO_SCALE, FEATURE_POSITIONS: local.positions}
    media = {name: tensor.to(device) for name, tensor in media.items()}
    micro_batch = MicroBatch(
        input_ids=local.input_ids.to(device),
        labels=local.labels.to(device),
        loss_mask=local.loss_mask.to(device),
        position_ids=torch.arange(_LENGTH, device=device).expand(_SAMPLES_PER_RANK, -1).contiguous(),
        media={},
        cu_seqlens=torch.empty(0, dtype=torch.int32, device=device),
        num_trained=int(local.loss_mask.sum()),
    )
    return SharedStep([micro_batch], lambda _: media)


def _largest_difference(trainer: Trainer, expected: dict[str, Tensor]) -> tuple[str, float]:
    """Return the parameter whose gradient differs most, and by how much, relative to its norm.

    Norms below a thousandth of the largest count as that.
    """
    smallest = 1e-3 * max(x.norm().item() for x in expected.values())
    differences = {}
    for name, parameter in whole_names(trainer.models[0]).items():
        gradient = vars(parameter)["main_grad"].float().cpu()
        differences[name] = (gradient - expected[name]).norm().item() / max(expected[name].norm().item(), smallest)
    return max(differences.items(), key=lambda x: x[1])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
