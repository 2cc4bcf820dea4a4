"""The products that training is compared with: what they need, their commands, and what was changed to run them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import automodel, lmms, swift, veomni
from benchmarks.train_step_rows import Entry

COMMON = ("datasets==4.8.4", "dill==0.4.1", "multiprocess==0.70.19", "qwen-vl-utils==0.0.14")


@dataclass(frozen=True)
class Product:
    """A published program.

    `packages`: what pip installs into the product's own folder, without their dependencies; PyTorch, Transformer
    Engine and megatron-core are ours. `changed`: what is not as published. `command`: of one rank, after the launcher.
    """

    title: str
    packages: tuple[str, ...]
    kinds: tuple[str, ...]
    """Classes of Hugging Face that it trains here."""
    changed: tuple[str, ...]
    command: Callable[[argparse.Namespace, Entry, str, Path, Path, bool], list[str]]
    unused: tuple[str, ...] = ()
    """Packages that need a stand-in in every process, where they are missing."""
    layouts: bool = False
    """Also tensor and pipeline parallel."""
    adapters: bool = False
    """Also --lora-r."""
    frozen_tower: bool = False
    """Also without --train-vision: the tower frozen, all else trained."""


PRODUCTS: Mapping[str, Product] = {
    "swift": Product(
        "Megatron-SWIFT 4.6.0",
        (
            *("ms-swift==4.6.0", "mcore-bridge==1.6.5", "peft==0.20.0", "addict==2.4.0", "binpacking==2.0.1"),
            *("dacite==1.9.2", "json-repair==0.64.6", *COMMON),
        ),
        swift.KINDS,
        swift.CHANGED,
        swift.command,
        unused=swift.UNUSED,
        layouts=True,
        adapters=True,
        frozen_tower=True,
    ),
    "lmms": Product(
        "lmms-engine 0.1.4",
        (
            *("lmms-engine==0.1.4", "transformers==5.8.1", "tokenizers==0.22.2", "jsonlines==4.0.0", "loguru==0.7.3"),
            *("torchdata==0.11.0", *COMMON),
        ),
        lmms.KINDS,
        lmms.CHANGED,
        lmms.command,
    ),
    "automodel": Product(
        "NeMo Automodel 0.7.0",
        (
            *("nemo-automodel==0.7.0", "transformers==5.18.0", "torchao==0.17.0", "torchdata==0.11.0"),
            *("megatron-fsdp==0.5.0", "flashoptim==0.1.4", *COMMON),
        ),
        automodel.KINDS,
        automodel.CHANGED,
        automodel.command,
        frozen_tower=True,
    ),
    "veomni": Product(
        "VeOmni 0.1.12",
        (*("veomni==0.1.12", "transformers==5.9.0", "tokenizers==0.22.2", "torchdata==0.11.0", *COMMON),),
        veomni.KINDS,
        veomni.CHANGED,
        veomni.command,
    ),
}


def launch(num_gpus: int) -> list[str]:
    """Return the launcher of a program that is given to Python with -m."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}", "-m"]
