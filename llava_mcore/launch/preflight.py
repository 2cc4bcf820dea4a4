"""Checks before a run starts, and the defaults that depend on the machine."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.config.rules.all_rules import check_devices, check_run
from llava_mcore.config.rules.delta_nets import check_kernels
from llava_mcore.config.rules.dims import ModelDims
from llava_mcore.config.rules.muon import MUON_MISSING
from llava_mcore.config.rules.schedule import check_schedule
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError, DataError, LlavaMcoreError, os_error_text
from llava_mcore.inference.evaluation.languages import require_libraries
from llava_mcore.launch.nodes import check_gpu_ids, check_interface
from llava_mcore.launch.singularity import require_image
from llava_mcore.templates.named import absolute_choice, check_choice

if TYPE_CHECKING:
    from llava_mcore.checkpoint.choose_start import StartPoint

_FOLDERS = ("load", "hf_dir", "save_dir", "non_persistent_dir", "non_persistent_local_dir")


def resolve(run: RunConfig, gpu_count: int) -> tuple[RunConfig, int]:
    """Return the run with all machine-dependent defaults resolved, and the number of processes.

    Paths become absolute, so that the stored configuration works from every folder.
    """
    gpus = run.launch.num_gpus
    per_node = gpus if gpus > 0 else len(run.launch.chosen_gpus) or max(1, gpu_count)
    num_nodes = run.launch.num_nodes or 1
    training = run.training
    has_length = any(x is not None for x in (training.train_iters, training.train_samples, training.train_epochs))
    changes = {
        "parallel": {"backend": run.parallel.backend or ("nccl" if gpu_count else "gloo")},
        "training": {
            "precision": training.precision or ("bf16" if gpu_count else "fp32"),
            "train_epochs": training.train_epochs if has_length else 1.0,
        },
        "launch": {"num_gpus": per_node, "num_nodes": num_nodes},
        "checkpoint": {name: _absolute(getattr(run.checkpoint, name)) for name in _FOLDERS},
        "adapter": {
            "load": _absolute(run.adapter.load),
            "frozen": tuple(folder.absolute() for folder in run.adapter.frozen),
        },
        "data": {"path": _absolute(run.data.path), "chat_template": absolute_choice(run.data.chat_template)},
    }
    sections = {name: getattr(run, name).model_copy(update=change) for name, change in changes.items()}
    return run.model_copy(update=sections), per_node * num_nodes


def with_epochs(run: RunConfig) -> RunConfig:
    """Return a run by epochs with the number of samples in an epoch; others are left as they are.

    Raises:
        DataError: the data cannot be opened, or has no epochs.
        ConfigError: training.epoch_samples is another number than that of the data.
    """
    training = run.training
    if training.train_epochs is None or run.data.path is None:
        return run
    from llava_mcore.data.loader.datasets import samples_per_epoch
    from llava_mcore.data.storage.dataset_path import check_dataset

    check_dataset(run.data.path)
    try:
        count = samples_per_epoch(run.data.path)
    except DataError:
        if training.epoch_samples is None:
            raise
        return run
    if training.epoch_samples not in (None, count):
        raise ConfigError(
            f"training.epoch_samples is {training.epoch_samples}, but an epoch of {run.data.path} has {count}: omit it"
        )
    return run.model_copy(update={"training": training.model_copy(update={"epoch_samples": count})})


def _absolute[T](path: T | None) -> T | Path | None:
    """Return an absolute path; URLs are left as they are."""
    return path.absolute() if isinstance(path, Path) else path


def preflight(
    run: RunConfig, world_size: int, gpu_count: int, typed: Collection[str] = (), *, in_image: bool = False
) -> list[str]:
    """Return everything that prevents a resolved run from starting.

    Args:
        typed: keys set by flags (`check_needs`).
        in_image: the run takes place in an image, which has libraries of its own.
    """
    # The machine: its GPUs, packages and network.
    errors: list[str] = check_devices(run.launch.num_gpus, gpu_count)
    if not in_image:
        errors += _missing_libraries(run)
    errors += [*check_gpu_ids(run.launch, gpu_count), *check_interface(run.launch)]
    # Folders. Rules need the model, so a missing one is reported here, before the imports that take most of the time.
    start = _check_folders(run, errors)
    if not _model_exists(run, start):
        return errors + check_run(run, None, world_size, gpu_count > 0, typed=typed)
    # These import transformers, which takes long: errors in flags and folders are reported first.
    from llava_mcore.adapters.adaptation import adapter_setup_of
    from llava_mcore.compat.delta_rule import capabilities_of_gpus, has_fla, triton_without_gradients
    from llava_mcore.data.encode.augment import Augmentation, augmentation_of
    from llava_mcore.data.loader.budgets import check_budgets
    from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
    from llava_mcore.training.assets import run_assets

    # The model and the data.
    dims: ModelDims | None = None
    source = ""
    if start is not None:
        source = str(start.hf_dir)
        with collecting(errors):
            hf = load_hf_config(start.hf_dir)
            dims = model_dims(hf)
            if start.checkpoint is not None:
                adapter_setup_of(run.adapter, hf, start.checkpoint, run.checkpoint.load)
    if dims is not None and not in_image:
        triton = triton_without_gradients(capabilities_of_gpus()) if dims.delta_key_heads and gpu_count else None
        errors += check_kernels(
            dims,
            deterministic=run.training.deterministic,
            has_gpus=gpu_count > 0,
            has_kernels=has_fla(),
            wrong_triton=triton,
        )
    with collecting(errors):
        check_choice(run.data.chat_template)
    with collecting(errors):
        Augmentation(run.data.augment)
    # Tokenizer and processors, once the folders that they are read from are right.
    if start is not None and dims is not None and not errors:
        with collecting(errors), _without_messages():
            assets = run_assets(run, start.hf_dir)
            check_budgets(run.data, assets)
            augmentation_of(run.data, assets)
    return errors + check_run(run, dims, world_size, gpu_count > 0, source, typed)


def _check_folders(run: RunConfig, errors: list[str]) -> StartPoint | None:
    """Check the data, and return the checkpoint to start from, None if there is no such; add problems to `errors`."""
    from llava_mcore.checkpoint.choose_start import resumes, start_point
    from llava_mcore.data.storage.dataset_path import VALIDATION, check_dataset

    start: StartPoint | None = None
    with collecting(errors):
        start = start_point(run)
        if resumes(run, start) and not [*check_schedule(run.training, run.optimizer)]:
            errors += _too_far(run, start)
    with collecting(errors):
        check_dataset(run.data.path)
        if run.validation.eval_interval is not None or run.validation.eval_generate is not None:
            check_dataset(run.data.path, VALIDATION)
    return start


def _model_exists(run: RunConfig, start: StartPoint | None) -> bool:
    """Return whether the folders of model and tokenizer exist; their contents are not checked."""
    folders = [run.checkpoint.hf_dir, run.checkpoint.load if start is None else start.hf_dir]
    return all(folder.exists() for folder in folders if folder is not None)


def preflight_of_job(
    run: RunConfig, world_size: int, gpu_count: int, typed: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Return what prevents a job from starting, and what this machine cannot check.

    The image of --sif-path, the model and the data have the same paths on the nodes. If the job runs in an image and
    this machine lacks our libraries, only their existence is checked. The folders of a container (--image) may not
    exist here; then only the rules that need no model are checked.
    """
    if run.launch.image is not None:
        return _preflight_of_container(run, world_size, gpu_count, typed)
    if run.launch.sif_path is None:
        return preflight(run, world_size, gpu_count, typed), []
    errors: list[str] = []
    with collecting(errors):
        require_image(run.launch.sif_path)
    # All checks of a run, if this machine has the libraries for them.
    try:
        return [*errors, *preflight(run, world_size, gpu_count, typed, in_image=True)], []
    except ModuleNotFoundError as error:
        package = error.name
    # Otherwise only whether the folders exist, and the rules that need no model.
    errors += [
        f"{flag} {path}: not on this machine; the job would look for it there" for flag, path in _absent(run).items()
    ]
    errors += check_run(run, None, world_size, gpu_count > 0, typed=typed)
    return errors, [_unchecked(f"this machine has no {package}")]


def _preflight_of_container(
    run: RunConfig, world_size: int, gpu_count: int, typed: Collection[str]
) -> tuple[list[str], list[str]]:
    absent = _absent(run)
    if not absent:
        try:
            return preflight(run, world_size, gpu_count, typed, in_image=True), []
        except ModuleNotFoundError as error:
            reason = f"this machine has no {error.name}"
    else:
        reason = f"{', '.join(map(str, absent.values()))} is not on this machine"
    here = run.checkpoint.model_copy(
        update={"hf_dir": None if run.checkpoint.hf_dir in absent.values() else Path.cwd()}
    )
    seen = run.model_copy(update={"checkpoint": here})
    return check_run(seen, None, world_size, gpu_count > 0, typed=typed), [_unchecked(reason)]


def _absent(run: RunConfig) -> dict[str, Path]:
    """Return the folders that a run reads but that are missing on this machine, with their flags."""
    folders = {
        "--megatron-load-dir": run.checkpoint.load,
        "--tokenizer-load-dir": run.checkpoint.hf_dir,
        "--data-path": run.data.path,
        "adapter.load": run.adapter.load,
    }
    return {flag: path for flag, path in folders.items() if isinstance(path, Path) and not path.exists()}


def _unchecked(reason: str) -> str:
    checks = "whether the checkpoint and the data can be read, and whether the layout divides the model"
    return f"not checked, because {reason}: {checks}. The job checks that at its start"


def _missing_libraries(run: RunConfig) -> list[str]:
    errors: list[str] = []
    if run.logging.mlflow and importlib.util.find_spec("mlflow") is None:
        errors.append("--mlflow needs the package mlflow-skinny: pip install 'llava-mcore[mlflow]'")
    if run.optimizer.name == "muon" and importlib.util.find_spec("emerging_optimizers") is None:
        errors.append(MUON_MISSING)
    if run.validation.eval_generate is not None:
        with collecting(errors):
            require_libraries()
    return errors


@contextlib.contextmanager
def collecting(errors: list[str]) -> Iterator[None]:
    """Add errors in the block to a list of problems."""
    try:
        yield
    except LlavaMcoreError as error:
        errors.append(str(error))
    except OSError as error:
        errors.append(os_error_text(error))


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Suppress remarks and warnings in the block: the ranks will log them."""
    logger = logging.getLogger("llava_mcore")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def completion(run: RunConfig) -> str | None:
    """Return a message if the run's own last checkpoint has all iterations; None otherwise.

    A run by epochs that ended sooner, because of packs or skipped samples, finds out only when it reads the checkpoint.
    """
    from llava_mcore.checkpoint.choose_start import start_point

    start = start_point(run)
    reached = _reached(run, start)
    return f"the run is complete: {reached}" if reached is not None and start.kind == "resume" else None


def _reached(run: RunConfig, start: StartPoint) -> str | None:
    """Return a message if a checkpoint has all iterations of the run, with how to continue; None otherwise."""
    num_iterations = run.training.num_iterations
    if start.iteration < num_iterations or not num_iterations:
        return None
    return (
        f"{start.checkpoint} has reached iteration {start.iteration} of {num_iterations}; to continue, raise "
        "--train-iters, --train-samples or --train-epochs, which count the whole run"
    )


def _too_far(run: RunConfig, start: StartPoint) -> list[str]:
    """Return why resuming another run's checkpoint would train and save nothing; empty if it would."""
    reached = _reached(run, start)
    if reached is None or start.kind != "load":
        return []
    return [f"{reached}, or omit --load-optim the first time, to start a new run with its weights"]
