"""A rank of NeMo Automodel's recipe for vision-language models, measured: reads a YAML file, see `automodel.py`."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers import cpu_look
from benchmarks.peers.meter import Meter
from benchmarks.peers.tokens import PAD_ID
from benchmarks.peers.versions import versions

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
PACKAGES = ("nemo-automodel", "torch", "transformers", "liger-kernel", "torchao", "torchdata", "flash-attn")


def main() -> None:
    """Train as `automodel` does."""
    if not torch.cuda.is_available():
        cpu_look.without_cuda()
    stack: dict[str, Any] = {"versions": versions(PACKAGES)}
    from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
    from nemo_automodel.recipes.vlm.finetune import FinetuneRecipeForVLM

    if not torch.cuda.is_available():
        cpu_look.at_automodel()
    config = parse_args_and_load_config()
    measure(FinetuneRecipeForVLM, Meter(stack), stack, config.get("packed_sequence.pack_size"))
    recipe = FinetuneRecipeForVLM(config)
    recipe.setup()
    keep_bounds_from_tower(recipe.model_parts[0].model.visual)
    recipe.run_train_validation_loop()


def keep_bounds_from_tower(tower: torch.nn.Module) -> None:
    """Drop the bounds of conversations from what the tower gets: transformers' class passes them on, beside its own."""

    def without(module: torch.nn.Module, args: Any, more: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {name: value for name, value in more.items() if name not in BOUNDS}

    tower.register_forward_pre_hook(without, with_kwargs=True, prepend=True)


def measure(recipe: Any, meter: Meter, stack: dict[str, Any], seq_length: int) -> None:
    """Measure the recipe's steps, with what they wait for their data."""
    step = recipe._run_train_optim_step

    def timed(self: Any, batches: list[dict[str, Any]], *args: Any, **more: Any) -> Any:
        if "parameters" not in stack:
            stack.update(_described(self))
            meter.begin()
        for batch in batches:
            ids, trained = batch["input_ids"], (batch["labels"] != -100).sum()
            numbers = batch.get("_packed_seq_ids")  # of conversations in a pack; missing where each has only one
            samples = len(ids) if numbers is None else int(numbers.amax(1).sum())
            meter.count((ids != PAD_ID).sum(), trained, samples, len(ids) * seq_length)
        found = step(self, batches, *args, **more)
        meter.end(float(found.metrics["loss"]))
        return found

    recipe._run_train_optim_step = timed


def _described(recipe: Any) -> dict[str, Any]:
    """Return what is trained and how."""
    model = recipe.model_parts[0]
    first = next(model.parameters())
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "weights": f"{first.dtype} in {type(first).__name__}",
        "attention": model.config._attn_implementation,
        "loss": type(recipe.loss_fn).__name__,
        "class": type(model).__qualname__,
        "activation_checkpointing": str(recipe.activation_checkpointing),
    }


if __name__ == "__main__":
    main()
