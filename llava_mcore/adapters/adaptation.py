"""A run's adapters: their plans, the weights they belong to, and what is trained of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from llava_mcore.adapters.adapter_record import Base, holds_adapters, read_base, read_plans
from llava_mcore.adapters.linear_layers import ModelLayers, model_layers
from llava_mcore.adapters.peft_config import plan_of_folder
from llava_mcore.adapters.targets import LoraSettings, own_parameters, plan_from_config, trained_parameters
from llava_mcore.checkpoint.layout import RUN_FILE, latest_checkpoint
from llava_mcore.config.load import load_run_config
from llava_mcore.config.sections.adapter import AdapterConfig
from llava_mcore.errors import ConfigError, problems


@dataclass(frozen=True)
class AdapterSetup:
    """A run's adapters.

    `plans`: the trained one first. `folders`: PEFT folders that adapters begin with, by name. `trained`: for every
    parameter of the model itself, by its Megatron name, whether it is trained. `own_names`: see `own_parameters`.
    `checkpoint`: holds the adapters' weights, if they come from one.
    """

    plans: tuple[LoraSettings, ...]
    layers: ModelLayers
    base: Base
    trained: Mapping[str, bool]
    own_names: frozenset[str]
    folders: Mapping[str, Path]
    checkpoint: Path | None = None

    @property
    def trained_parts(self) -> frozenset[str]:
        """Return the parts in which anything is trained, including adapters."""
        members = self.layers.adaptable
        adapted = (x for plan in self.plans if plan.is_trained for x in plan.lora_ranks)
        return self.unfrozen_parts | {members[x].part for x in adapted}

    @property
    def unfrozen_parts(self) -> frozenset[str]:
        """Return the parts of which some of the model's own parameters are trained."""
        return frozenset(name.partition(".")[0] for name, is_trained in self.trained.items() if is_trained)

    def num_weights(self, part: str) -> int:
        """Return the weights of A and B of all adapters in a part that a token meets."""
        members = self.layers.adaptable
        return sum(
            r * members[x].width for plan in self.plans for x, r in plan.lora_ranks.items() if members[x].part == part
        )


def adapter_setup_of(
    adapter: AdapterConfig, hf: PretrainedConfig, checkpoint: Path | None, load: Path | None
) -> AdapterSetup | None:
    """Return a run's adapters, or None if it trains without.

    Args:
        checkpoint: where the run starts from: a model, or what a run with an adapter has saved.
        load: folder that the run names to load from.

    Raises:
        ConfigError, ConversionError, CheckpointError: names that the model does not have, an adapter of another model,
        or weights other than those that it was trained on.
    """
    # Without an adapter: only a model can be trained.
    stored = checkpoint is not None and holds_adapters(checkpoint)
    if not adapter.is_on:
        if stored:
            raise ConfigError(
                f"{checkpoint} holds an adapter, not a model: give the flags that it was trained with (run.yaml), or "
                "turn it into a model with export-hf --merge"
            )
        return None
    assert checkpoint is not None, "the rules refuse an adapter on random weights"
    # A resume: the adapters are those that the checkpoint describes.
    layers = model_layers(hf)
    if stored:
        _check_settings(adapter, checkpoint)
        base = base_of(checkpoint, load)
        return _adaptation(read_plans(checkpoint, layers), layers, base, {}, checkpoint)
    # A new run: the trained adapter comes first, from the flags or a PEFT folder, then the frozen ones.
    folders = {folder.name: folder for folder in adapter.frozen}
    if adapter.load is None:
        first = plan_from_config(adapter, layers)
    else:
        folders[adapter.name] = adapter.load
        first = plan_of_folder(adapter.load, adapter.name, layers, is_trained=True)
    others = [plan_of_folder(folder, folder.name, layers, is_trained=False) for folder in adapter.frozen]
    return _adaptation((first, *others), layers, Base.of(checkpoint), folders, None)


def _adaptation(
    plans: tuple[LoraSettings, ...],
    layers: ModelLayers,
    base: Base,
    folders: Mapping[str, Path],
    checkpoint: Path | None,
) -> AdapterSetup:
    trained = trained_parameters(plans[0], layers)
    return AdapterSetup(plans, layers, base, trained, own_parameters(plans, layers), folders, checkpoint)


def _check_settings(adapter: AdapterConfig, checkpoint: Path) -> None:
    """Refuse settings that a checkpoint's adapter does not have, and that would have no effect on it."""
    before = load_run_config(checkpoint / RUN_FILE, [], {}).adapter
    pairs = {
        key: (_setting_text(before, key), _setting_text(adapter, key))
        for key in type(adapter).model_fields
        if key != "quantize"
    }
    mismatches = [
        f"adapter.{key}: it has {old}, this run asks for {new}" for key, (old, new) in pairs.items() if old != new
    ]
    if mismatches:
        title = (
            f"{checkpoint} holds an adapter, and a run that starts from it continues that adapter: give the same "
            "settings, or export the adapter (export-hf) and name its folder with adapter.load, or merge it (export-hf "
            "--merge)"
        )
        raise ConfigError(problems(title, mismatches))


def _setting_text(adapter: AdapterConfig, key: str) -> str:
    """Return a setting as it is compared. Folders may have moved since."""
    value = adapter.model_dump()[key]
    if key == "load":
        return "none" if value is None else "a folder"
    if key == "frozen":
        return ", ".join(folder.name for folder in adapter.frozen) or "none"
    return str(value)


def base_of(checkpoint: Path, load: Path | None) -> Base:
    """Return the weights that a checkpoint's adapters belong to, where they are now.

    Args:
        load: folder that the run names to load from: the model's, or that of the run whose adapter is continued.

    Raises:
        CheckpointError: they are not there, or other weights are.
    """
    base = read_base(checkpoint)
    is_model = load is not None and load != checkpoint.parent and not holds_adapters(latest_checkpoint(load)[0])
    return Base(base.found_at(load if is_model else None), base.identity)
