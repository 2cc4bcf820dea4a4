"""A plan as text, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llava_mcore.config.flags import ALL_FLAGS
from llava_mcore.config.schema import RunConfig
from llava_mcore.plan.hardware.gpus import GIB
from llava_mcore.plan.layout import RunLayout
from llava_mcore.plan.predict import Prediction, Stage
from llava_mcore.plan.search import Candidate, Searched, SearchResult

MOST_REASONS = 12
MEASURED = ("h100", "h200")
"""Kinds of GPUs that constants were fitted to."""


def describe(layout: RunLayout) -> str:
    """Return a layout in words, without what is usual."""
    words = [f"tp {layout.tp}", *[f"cp {layout.cp}"] * (layout.cp > 1), f"pp {layout.pp}", f"dp {layout.dp}"]
    words.append(f"micro-batch {layout.micro_batch_size}")
    words += [f"ep {layout.ep}"] * (layout.ep > 1) + [f"etp {layout.etp}"] * (layout.etp > 1)
    if layout.virtual > 1:
        words.append(f"{layout.virtual} chunks")
    if len(set(layout.layers)) > 1:
        words.append("layers " + "+".join(map(str, _shortened(layout.layers))))
    words += [f"FSDP {layout.fsdp}"] * (layout.fsdp != "none") + [f"HSDP {layout.replicas}"] * (layout.replicas > 1)
    words += ["sequence parallel"] * layout.sequence_parallel + ["overlapped messages"] * layout.tp_comm_overlap
    words += ["whole towers"] * layout.whole_towers
    words += [f"recompute {layout.recompute}"] * (layout.recompute != "none")
    words += ["recompute tower"] * layout.recompute_vision + ["graphs"] * layout.graphs
    words += [f"FP8 {layout.fp8}"] * (layout.fp8 != "none")
    words += [f"state {layout.state_bytes:g} B"] * (layout.state_bytes != 12)
    words += ["Muon"] * (layout.matrix_state_bytes < layout.state_bytes)
    if layout.adapter.is_on:
        words.append(f"LoRA {layout.adapter.language}")
        words += [layout.adapter.quantize.upper()] * (layout.adapter.quantize != "none")
    words += ["tower trained"] * layout.trains_tower
    return ", ".join(words)


def _shortened(layers: Sequence[int]) -> list[str]:
    if len(layers) <= 4:
        return [str(x) for x in layers]
    return [str(layers[0]), f"{len(layers) - 2}x{layers[1]}", str(layers[-1])]


def head(searched: Searched, data: str) -> list[str]:
    """Return what the plan is for, and what it assumes."""
    model, gpu, run = searched.model, searched.gpu, searched.run
    measured = (
        "constants fitted to measured steps on H100 and H200"
        if gpu.name in MEASURED
        else f"published figures; the efficiencies are those of H100 and H200, nothing was measured on {gpu.name}"
    )
    nodes = -(-searched.world // gpu.per_node)
    across = f"; {nodes} nodes with {gpu.network / 1e9:g} GB/s per GPU, assumed" if nodes > 1 else ""
    packing = "packs" if run.data.packing else "samples without packing (--packing is missing)"
    return [
        f"{model.model_type}: {model.parameters / 1e9:.2f} billion parameters, "
        f"{model.tower.parameters / 1e9:.2f} of the tower",
        f"{searched.world} x {gpu.name}, {gpu.memory:g} GiB each: {measured}{across}",
        f"{packing} of up to {run.data.seq_length:,} tokens, {run.training.global_batch_size} per step; {data}",
    ]


def table(candidates: Sequence[Candidate], world: int) -> list[str]:
    """Return a line per layout."""
    lines = [f"{'tokens/s':>10} {'per GPU':>8} {'s/step':>8} {'bubble':>7} {'GiB':>6}  layout"]
    for candidate in candidates:
        p = candidate.prediction
        speed = p.tokens_per_second
        lines.append(
            f"{speed:10,.0f} {speed / world:8,.0f} {p.seconds:8.3f} {p.bubble / p.seconds:7.1%} {p.memory:6.1f}  "
            f"{describe(p.layout)}"
        )
    return lines


def stages(prediction: Prediction) -> list[str]:
    """Return memory and time of every stage; equal stages in a row are one line."""
    memory = tuple(vars(prediction.stages[0].memory))
    lines = ["GiB of a GPU by stage:", "  stage layers  " + _names(memory)]
    for name, stage, index in _rows(prediction):
        values = [vars(stage.memory)[x] / GIB for x in memory] + [stage.memory.total / GIB]
        layers = prediction.layout.layers[index]
        lines.append(f"  {name:>5} {layers:6}  " + " ".join(f"{x:11.2f}" for x in values))
    parts = tuple(vars(prediction.stages[0].forward))
    lines += [
        "ms of a micro-batch by stage, both passes:",
        "  stage  " + _names(parts),
    ]
    for name, stage, _ in _rows(prediction):
        both = stage.forward + stage.backward
        lines.append(f"  {name:>5}  " + " ".join(f"{1e3 * x:11.1f}" for x in (*vars(both).values(), both.total)))
    p = prediction
    lines.append(
        f"a step: {p.passes:.3f} s of passes with a bubble of {p.bubble:.3f} s, {p.messages:.3f} s of exposed messages "
        f"between replicas, {p.update:.3f} s of update"
    )
    return lines


def _names(columns: Sequence[str]) -> str:
    return " ".join(f"{x.split('_')[0]:>11}" for x in (*columns, "total"))


def _rows(prediction: Prediction) -> list[tuple[str, Stage, int]]:
    rows: list[tuple[str, Stage, int]] = []
    first = 0
    for index, stage in enumerate(prediction.stages):
        if (
            index + 1 < len(prediction.stages)
            and _same(stage, prediction.stages[index + 1])
            and len(prediction.stages) > 8
        ):
            continue
        rows.append((str(index) if first == index else f"{first}-{index}", stage, index))
        first = index + 1
    return rows


def _same(one: Stage, other: Stage) -> bool:
    return (one.forward, one.backward) == (other.forward, other.backward)


def compared(one: Candidate, other: Candidate, world: int) -> list[str]:
    """Return two layouts side by side."""
    lines = table([one, other], world)
    first, second = one.prediction, other.prediction
    rows: list[tuple[str, float, float]] = [
        ("tokens/s", first.tokens_per_second, second.tokens_per_second),
        ("s/step", first.seconds, second.seconds),
        ("s of passes", first.passes, second.passes),
        ("s of bubble", first.bubble, second.bubble),
        ("s of messages between replicas", first.messages, second.messages),
        ("s of update", first.update, second.update),
        ("GiB", first.memory, second.memory),
    ]
    lines += ["", f"{'':32} {'first':>12} {'second':>12}  second ÷ first"]
    for name, a, b in rows:
        ratio = f"{b / a:8.3f}" if a else f"{'-':>8}"
        lines.append(f"{name:32} {a:12,.3f} {b:12,.3f}  {ratio}")
    for name, prediction in (("The first", first), ("The second", second)):
        lines += ["", f"{name}:", *stages(prediction)]
    return lines


def left_out(result: SearchResult, limit: float) -> list[str]:
    """Return why layouts are not in the table."""
    lines = []
    if result.too_large:
        nearest = result.too_large[0].prediction
        lines.append(
            f"{len(result.too_large)} layouts need more than {limit:.1f} GiB, 95 % of a GPU's memory; "
            f"the nearest {nearest.memory:.1f}: "
            f"{describe(nearest.layout)}"
        )
    reasons = result.refused.most_common()
    lines += [f"{count} layouts: {reason}" for reason, count in reasons[:MOST_REASONS]]
    rest = sum(count for _, count in reasons[MOST_REASONS:])
    return [*lines, *([f"{rest} layouts for {len(reasons) - MOST_REASONS} other reasons"] if rest else [])]


def command(candidate: Candidate, searched: Searched, typed: Sequence[tuple[str, str]]) -> str:
    """Return the command that trains with a layout. `typed`: keys and texts of the run's own arguments, which it
    repeats unless the layout has another value."""
    gpus, nodes = searched.world, 1
    if gpus > searched.gpu.per_node:
        gpus, nodes = searched.gpu.per_node, -(-gpus // searched.gpu.per_node)
    changed_keys = {key for key, value in candidate.changes.items() if _value(searched.run, key) != value}
    words = [text for key, text in typed if key not in changed_keys]
    words += [f"-g {gpus}", *([f"--node {nodes}"] if nodes > 1 else []), *differences(candidate, searched)]
    # Overrides come last.
    ordered = [*(x for x in words if "=" not in x), *(x for x in words if "=" in x)]
    return " ".join(["python -m llava_mcore train", *ordered])


def missing_flags(run: RunConfig) -> list[str]:
    """Return the flags without which `train` refuses the command, because the plan needs none of them."""
    values = {
        "--megatron-load-dir": run.checkpoint.load or run.checkpoint.init,
        "--data-path": run.data.path,
        "--save-dir": run.checkpoint.save_dir,
    }
    return [flag for flag, value in values.items() if not value]


def _value(run: RunConfig, key: str) -> object:
    section, _, leaf = key.partition(".")
    value: object = vars(vars(run)[section])[leaf]
    return value


def differences(candidate: Candidate, searched: Searched) -> list[str]:
    """Return the flags and overrides of a layout where it differs from the run that the search began with."""
    flags = {flag.key: flag for flag in ALL_FLAGS if flag.value is None}
    words = []
    for key, value in candidate.changes.items():
        if _value(searched.run, key) == value:
            continue
        flag = flags.get(key)
        if flag is None or value in (None, False):
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            words.append(f"{key}={text}")
        else:
            words.append(flag.name if value is True else f"{flag.name} {value}")
    return words


def as_json(result: SearchResult, searched: Searched, data: str) -> dict[str, Any]:
    """Return everything as plain containers."""
    return {
        "gpu": searched.gpu.name,
        "gpus": searched.world,
        "assumptions": head(searched, data),
        "fitting": [_json(x) for x in result.fitting],
        "too_large": [_json(x) for x in result.too_large],
        "refused": dict(result.refused.most_common()),
    }


def _json(candidate: Candidate) -> Mapping[str, Any]:
    p = candidate.prediction
    return {
        "changes": dict(candidate.changes),
        "layout": describe(p.layout),
        "layers": list(p.layout.layers),
        "tokens_per_second": p.tokens_per_second,
        "seconds": {"step": p.seconds, "passes": p.passes, "bubble": p.bubble}
        | {"messages": p.messages, "update": p.update},
        "gib": p.memory,
        "gib_reserved": p.reserved,
        "stages": [
            {"memory": asdict(x.memory), "forward": asdict(x.forward), "backward": asdict(x.backward)} for x in p.stages
        ],
    }
