"""`plan`: memory, time and the best layout of a run before it is launched, from shapes alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llava_mcore.cli.base.entry import command_main
from llava_mcore.config.flags import CommandLine, make_parser, name_of
from llava_mcore.config.load import as_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError, problems
from llava_mcore.plan import report
from llava_mcore.plan.dataset import material_of
from llava_mcore.plan.forecast import balanced, chosen_tower, with_tower
from llava_mcore.plan.hardware.calibration import read_calibration, write_calibration
from llava_mcore.plan.hardware.efficiency import Efficiency
from llava_mcore.plan.hardware.gpus import GPUS, gpu_named
from llava_mcore.plan.search import VARIED, Candidate, Searched, SearchResult, search
from llava_mcore.plan.seconds import Machine
from llava_mcore.plan.sizes.read_config import read_model
from llava_mcore.plan.timeline import draw

MOST_GPUS = 1 << 20


def parser() -> argparse.ArgumentParser:
    """Flags of a run, and those of a plan."""
    p = make_parser(
        "python -m llava_mcore plan",
        "Predict memory and time of a run for every layout that train accepts; no GPU is needed. "
        "Takes the run's own flags; --gpus is the number of GPUs (per node, with --node).",
        dry_run=False,
        lists_flags=False,
    )
    plan_flags = p.add_argument_group("plan")
    plan_flags.add_argument(
        "--hf-dir", type=Path, metavar="DIR", help="Hugging Face folder, or a config.json; no weights"
    )
    plan_flags.add_argument(
        "--gpu", default="h200", metavar="KIND", help=f"kind of GPU: {', '.join(GPUS)} (default h200)"
    )
    plan_flags.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU, if it has more or less")
    plan_flags.add_argument(
        "--vary", nargs="+", choices=VARIED, default=[], help="also try options that change training results"
    )
    # What to predict, and how to show it.
    plan_flags.add_argument("--as-given", action="store_true", help="predict only the given layout")
    plan_flags.add_argument(
        "--compare", nargs="+", metavar="key=value", help="compare the given layout with one that has these values"
    )
    plan_flags.add_argument(
        "--draw", type=Path, metavar="FILE", help="draw the timeline of a step of the first layout, as .png or .svg"
    )
    plan_flags.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="only measure this machine's GPUs and write FILE"
    )
    plan_flags.add_argument("--calibration", type=Path, metavar="FILE", help="file written by --calibrate")
    plan_flags.add_argument("--top", type=int, default=10, metavar="N", help="layouts to list (default %(default)s)")
    plan_flags.add_argument("--best", action="store_true", help="print only the command of the best layout")
    plan_flags.add_argument("--json", action="store_true", help="print everything as JSON")
    return p


def run(args: argparse.Namespace) -> int:
    """Print the plan; exit code 2 if no layout fits. ConfigError for values that do not make sense."""
    if args.calibrate is not None:
        return _calibrate(args.calibrate)
    searched, words, typed = _read(args)
    if args.compare:
        return _compare(searched, words, args)
    if args.as_given:
        return _given_alone(searched, words, args)
    result = search(searched)
    if args.json:
        print(json.dumps(report.as_json(result, searched, words), indent=1))
        return 0 if result.fitting else 2
    if not result.fitting:
        raise ConfigError(_nothing_fits(result, searched))
    best = result.fitting[0]
    command = report.command(best, searched, typed)
    if args.best:
        print(command)
        return 0
    lines = [*report.head(searched, words), "", *report.table(result.fitting[: args.top], searched.world), ""]
    lines += ["The first one:", *report.stages(best.prediction), "", "Left out:"]
    lines += [*report.left_out(result, searched.gpu.usable), "", command]
    missing = report.missing_flags(searched.run)
    lines += [f"to run it, add {', '.join(missing)}"] if missing else []
    print("\n".join(lines))
    _draw(best, args.draw)
    return 0


def _calibrate(path: Path) -> int:
    """Measure this machine's GPUs and write the file."""
    from llava_mcore.training.measure_gpu import measure  # imports torch, which plans do without

    calibration = measure()
    write_calibration(calibration, path)
    print(f"{calibration.device}: {calibration.describe()}\nwritten: {path}; plan with --calibration {path}")
    return 0


def _draw(candidate: Candidate, path: Path | None) -> None:
    if path is not None:
        draw(candidate.prediction, path, report.describe(candidate.prediction.layout))
        print(f"drawn: {path}")


def _read(args: argparse.Namespace) -> tuple[Searched, str, Sequence[tuple[str, str]]]:
    """Return what to search, the assumptions about the data, and the run's own arguments for a command."""
    args.overrides, configs = [x for x in args.overrides if "=" in x], [x for x in args.overrides if "=" not in x]
    if len(configs) > 1 or (configs and args.config is not None):
        raise ConfigError(f"{', '.join(configs)}: give one file of a run's configuration")
    if configs:
        args.config = Path(configs[0])
    line = CommandLine.of(args)
    gpus = line.flags.pop("launch.num_gpus", None)
    configured = line.load()
    hf_dir = args.hf_dir or configured.checkpoint.hf_dir
    if hf_dir is None:
        raise ConfigError("which model? give its folder with --hf-dir; a config.json is enough")
    model = read_model(hf_dir)
    gpu = gpu_named(args.gpu)
    if args.gpu_memory is not None:
        if args.gpu_memory <= 0:
            raise ConfigError(f"--gpu-memory {args.gpu_memory:g}: expected GiB above 0")
        gpu = replace(gpu, memory=args.gpu_memory)
    world = _world(gpus, configured)
    pixels = configured.data.min_pixels or model.pixels[0], configured.data.max_pixels or model.pixels[1]
    model = replace(model, pixels=pixels)
    material = material_of(model, configured.data.path)
    if configured.parallel.balance == "auto" and configured.parallel.pipeline_model_parallel_size > 1:
        configured = balanced(with_tower(configured, world, hf_dir, gpu.devices[0]).run, world, hf_dir, gpu.devices[0])
    fit, words = Efficiency(), material.words
    if args.calibration is not None:
        calibration = read_calibration(args.calibration, gpu)
        fit, words = calibration.applied(fit), f"{words}; measured here: {calibration.describe()}"
    searched = Searched(model, material.samples, configured, world, Machine(gpu, fit), args.vary)
    # The run's own arguments, by their keys.
    typed = [("", f"--config {args.config}")] if args.config else []
    if args.hf_dir is not None and args.hf_dir.is_dir():
        line.flags.setdefault("checkpoint.hf_dir", str(args.hf_dir))
    for key, value in line.flags.items():
        typed.append((key, name_of(key) if value is True else f"{name_of(key)} {value}"))
    return searched, words, [*typed, *((text.partition("=")[0].strip(), text) for text in line.overrides)]


def _world(gpus: object, run: RunConfig) -> int:
    """Return the number of all GPUs."""
    try:
        per_node = int(str(gpus)) if gpus is not None else run.launch.num_gpus
    except ValueError as error:
        raise ConfigError(f"--gpus {gpus}: expected a whole number") from error
    world = per_node * (run.launch.num_nodes or 1)
    if not 1 <= world <= MOST_GPUS:
        raise ConfigError(f"--gpus {per_node}: a plan needs the number of GPUs, from 1 to {MOST_GPUS:,}")
    return world


def _candidate(searched: Searched, run: RunConfig) -> Candidate:
    """Return a configuration with its prediction. ConfigError if `train` would refuse it."""
    if run.parallel.vision_data_parallel == "auto" and run.parallel.tensor_model_parallel_size > 1:
        # As a run will choose, which knows the kind of GPU and no calibration.
        of_run = replace(searched, run=run, machine=Machine(searched.gpu, Efficiency()))
        run = chosen_tower(of_run, searched.gpu).run
    refused = searched.problems(run)
    if refused:
        raise ConfigError(problems("train would refuse this", refused))
    return Candidate({}, run, searched.predict(run))


def _given_alone(searched: Searched, words: str, args: argparse.Namespace) -> int:
    """Print the prediction of the given layout."""
    candidate = _candidate(searched, searched.run)
    prediction = candidate.prediction
    if args.json:
        print(json.dumps(report.as_json(SearchResult([candidate]), searched, words), indent=1))
        return 0
    fits = prediction.memory <= searched.gpu.usable
    lines = [*report.head(searched, words), "", *report.table([candidate], searched.world)]
    lines += ["", *report.stages(prediction)]
    if not fits:
        usable = f"{searched.gpu.usable:.1f} (95 % of a GPU's memory)"
        lines += ["", f"does not fit: {prediction.memory:.1f} GiB of {usable}"]
    print("\n".join(lines))
    _draw(candidate, args.draw)
    return 0 if fits else 2


def _compare(searched: Searched, words: str, args: argparse.Namespace) -> int:
    """Print the given layout beside another one."""
    pairs = [text.partition("=") for text in args.compare]
    if not all(equals for _, equals, _ in pairs):
        raise ConfigError(
            f"--compare {' '.join(args.compare)}: expected key=value, such as training.micro_batch_size=2"
        )
    values = {key.strip(): None if value == "null" else value for key, _, value in pairs}
    other = as_run_config({**searched.run.model_dump(mode="json"), **values})
    one, two = _candidate(searched, searched.run), _candidate(searched, other)
    print("\n".join([*report.head(searched, words), "", *report.compared(one, two, searched.world)]))
    _draw(two, args.draw)
    return 0


def _nothing_fits(result: SearchResult, searched: Searched) -> str:
    """Return what is nearest and what would make it fit."""
    lines = report.left_out(result, searched.gpu.usable)
    advice = []
    if result.too_large:
        advice.append("more --gpus, or a kind with more memory")
        for kinds, words in ((("moments",), "moments in bf16"), (("adapter",), "LoRA")):
            other = search(replace(searched, vary=kinds))
            if other.fitting:
                prediction = other.fitting[0].prediction
                advice.append(
                    f"{words} (--vary {kinds[0]}): {report.describe(prediction.layout)}, {prediction.memory:.1f} GiB"
                )
    return problems("no layout fits", [*lines, *(f"what would help: {x}" for x in advice)])


main = command_main(parser, run, warns_of_versions=False)
