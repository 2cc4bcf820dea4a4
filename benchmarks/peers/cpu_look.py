"""Without a GPU: a product starts, reads its flags, tokenizes and packs, shows two micro-batches and stops."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.meter import leave

NUM_PACKS = 2


def without_cuda() -> None:
    """Let megatron-core be imported. Call before anything else imports it."""
    replaced: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = lambda self, *_, **__: self


class _OnCpu:
    """The module torch for a file that asks for the current GPU as a device."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: torch.device("cpu")) if name == "device" else getattr(torch, name)


def at_automodel() -> None:
    """Let NeMo Automodel build its model on the CPU."""
    from nemo_automodel._transformers import auto_model

    auto_model.torch = _OnCpu()


def at_veomni() -> None:
    """Give VeOmni's trainer a process group, which it chooses by the GPU, and the functions that it asks for memory."""
    replaced: dict[str, Any] = {
        "max_memory_allocated": lambda: 0,
        "max_memory_reserved": lambda: 0,
        "memory_allocated": lambda: 0,
        "memory_stats": lambda: {"num_alloc_retries": 0},
        "empty_cache": lambda: None,
        "get_device_name": lambda: "H200",
    }
    for name, value in replaced.items():
        setattr(torch.cpu, name, value)
    torch.distributed.init_process_group("gloo")
    from veomni.models import loader

    load = loader.load_model_weights
    loader.load_model_weights = lambda model, path, device: load(model, path, "cpu")  # a single GPU's, as cuda


def at_swift(base: Any) -> None:
    """Stop Megatron-SWIFT where it would build its model. `base`: swift.megatron.trainers.base."""
    from swift.megatron.pipelines.train import sft

    prepare_dataset = sft.MegatronSft._prepare_dataset
    kept: dict[str, Any] = {}

    def keeping(self: Any) -> Any:
        kept["packs"], other = prepare_dataset(self)
        return kept["packs"], other

    def look(self: Any) -> None:
        size = self.args.micro_batch_size
        for number in range(NUM_PACKS):
            rows = [kept["packs"][number * size + place] for place in range(size)]
            batch = base.prepare_batch(self.args, self.template.data_collator(rows, padding_to=64))
            show(batch)
            print("bounds", batch["packed_seq_params"].cu_seqlens_q.tolist(), flush=True)
        print("lengths of packs", kept["packs"].packed_length[:8], "of", len(kept["packs"]), "packs", flush=True)
        leave()

    sft.MegatronSft._prepare_dataset = keeping
    sft.MegatronSft.prepare_trainer = look


def show(batch: dict[str, Any]) -> None:
    """Print the shapes of a micro-batch."""
    print("micro-batch", {name: tuple(getattr(x, "shape", ())) for name, x in batch.items()}, flush=True)
