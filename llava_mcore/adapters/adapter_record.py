"""adapters.json in a checkpoint: its adapters, and the weights that they belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.adapters.linear_layers import ModelLayers
from llava_mcore.adapters.targets import LoraSettings
from llava_mcore.checkpoint.checksums import recorded
from llava_mcore.checkpoint.complete import RUN_JSON, iterations
from llava_mcore.checkpoint.layout import hf_folder, is_iteration, iteration_folder, newest_iteration, read_manifest
from llava_mcore.errors import CheckpointError, ConfigError
from llava_mcore.files.regular import read_object

FILE = "adapters.json"
_FORMAT = 1
_METADATA = ".metadata"
_IMPORT = "import"


@dataclass(frozen=True)
class Base:
    """The checkpoint whose weights adapters belong to. `identity`: see `weights_identity`."""

    folder: Path
    identity: str

    @classmethod
    def of(cls, checkpoint: Path) -> Base:
        """Return that of one iteration's folder."""
        return cls(checkpoint.absolute(), weights_identity(checkpoint))

    @property
    def is_import(self) -> bool:
        """Whether the weights are those of an imported Hugging Face folder."""
        return self.identity.startswith(f"{_IMPORT}:")

    def base_dir(self, base_dir: Path | None) -> Path | None:
        """Return `base_dir`, which may be meant for another adapter: None if it does not hold these weights, and they
        are still where they were."""
        if base_dir is None or not is_iteration(self.folder):
            return base_dir
        return base_dir if weights_identity(self._among(base_dir)) == self.identity else None

    def found_at(self, base_dir: Path | None) -> Path:
        """Return where these weights are: in a checkpoint of the folder `base_dir`, or where they were.

        Args:
            base_dir: a folder of checkpoints, or one iteration's.

        Raises:
            CheckpointError: they are not there, or other weights are.
        """
        folder = self.folder if base_dir is None else self._among(base_dir)
        if not is_iteration(folder):
            raise CheckpointError(
                f"{folder}: the weights that the adapter was trained on are no longer there; say where with "
                "--megatron-load-dir (training) or --base-dir (every other command), or move them back"
            )
        identity = weights_identity(folder)
        if identity != self.identity:
            raise CheckpointError(
                f"{folder} holds other weights than those that the adapter was trained on, {self.folder} "
                f"(now {identity}, then {self.identity}): give that checkpoint"
            )
        return folder

    def _among(self, root: Path) -> Path:
        """Return the iteration of a folder that holds these weights; its newest if none does."""
        newest = newest_iteration(root)
        others = [iteration_folder(root, iteration) for iteration in reversed(iterations(root))]
        complete = [newest, *(folder for folder in others if is_iteration(folder))]
        return next((folder for folder in complete if weights_identity(folder) == self.identity), newest)


def weights_identity(checkpoint: Path) -> str:
    """Return a text that is the same for the same weights.

    For an import, it is computed from the SHA-256 of the Hugging Face tensors, so another import of the same folder
    counts as the same. For a checkpoint of training, it is computed from the files' checksums. Nothing large is read.

    Raises:
        CheckpointError: the folder holds no checkpoint.
    """
    manifest = None if (checkpoint / RUN_JSON).is_file() else read_manifest(hf_folder(checkpoint))
    if manifest is not None:
        return _digest(_IMPORT, manifest.digests)
    files = recorded(checkpoint)
    if files is not None:
        return _digest("files", {name: text for name, text in files.items() if "/" not in name})
    path = checkpoint / _METADATA
    if not path.is_file():
        raise CheckpointError(f"{checkpoint}: no {_METADATA}; expected the folder of one iteration")
    return _digest("metadata", {_METADATA: hashlib.sha256(path.read_bytes()).hexdigest()})


def _digest(kind: str, parts: dict[str, str]) -> str:
    return f"{kind}:{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()}"


def holds_adapters(checkpoint: Path) -> bool:
    """Return whether a checkpoint holds adapters instead of a model."""
    return (checkpoint / FILE).is_file()


def check_base_dir(checkpoint: Path, base_dir: Path | None) -> None:
    """Check, before anything is loaded, that the weights below a checkpoint's adapters are there.

    Args:
        base_dir: what the user gave: see `Base.found_at`.

    Raises:
        CheckpointError: they are not.
        ConfigError: a folder was given, and the checkpoint holds a whole model.
    """
    if holds_adapters(checkpoint):
        read_base(checkpoint).found_at(base_dir)
    elif base_dir is not None:
        raise ConfigError(f"{checkpoint} holds a whole model: --base-dir has no effect, omit it")


def write_record(checkpoint: Path, base: Base, plans: Sequence[LoraSettings], layers: ModelLayers) -> None:
    """Write adapters.json."""
    content = {
        "format": _FORMAT,
        "base": {"folder": str(base.folder), "identity": base.identity},
        "adapters": [_plan_record(plan, layers) for plan in plans],
    }
    (checkpoint / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _plan_record(plan: LoraSettings, layers: ModelLayers) -> dict[str, Any]:
    members = layers.adaptable
    return {
        "name": plan.name,
        "trained": plan.is_trained,
        "dropout": plan.dropout,
        "dora": plan.dora,
        "rslora": plan.rslora,
        "bias": plan.bias,
        "modules_to_save": list(plan.modules_to_save),
        # By names that do not change with transformers' versions.
        "layers": {
            f"{members[name].part}/{members[name].key}": [r, plan.alphas[name]] for name, r in plan.lora_ranks.items()
        },
    }


def read_base(checkpoint: Path) -> Base:
    """Return the weights that a checkpoint's adapters belong to. CheckpointError if adapters.json is damaged."""
    content = _read(checkpoint)
    try:
        return Base(Path(content["base"]["folder"]), str(content["base"]["identity"]))
    except (KeyError, TypeError) as error:
        raise _damaged(checkpoint, error) from error


def read_plans(checkpoint: Path, layers: ModelLayers) -> tuple[LoraSettings, ...]:
    """Return a checkpoint's adapters. CheckpointError if adapters.json is damaged, or of another model."""
    content = _read(checkpoint)
    by_key = {f"{x.part}/{x.key}": name for name, x in layers.adaptable.items()}
    try:
        return tuple(
            LoraSettings(
                name=str(x["name"]),
                lora_ranks={by_key[key]: int(lora_rank) for key, (lora_rank, _) in x["layers"].items()},
                alphas={by_key[key]: float(alpha) for key, (_, alpha) in x["layers"].items()},
                dropout=float(x["dropout"]),
                dora=bool(x["dora"]),
                rslora=bool(x["rslora"]),
                bias=x["bias"],
                modules_to_save=tuple(map(str, x["modules_to_save"])),
                is_trained=bool(x["trained"]),
            )
            for x in content["adapters"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(checkpoint, error) from error


def _read(checkpoint: Path) -> dict[str, Any]:
    content = read_object(checkpoint / FILE, CheckpointError)
    if content.get("format") != _FORMAT:
        raise CheckpointError(f"{checkpoint / FILE}: format {content.get('format')}; this version reads {_FORMAT}")
    return content


def _damaged(checkpoint: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{checkpoint / FILE} is damaged, or of another model ({error!r})")
