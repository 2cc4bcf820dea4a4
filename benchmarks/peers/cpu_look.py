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
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = lambda self, *_, **__: self


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
