"""The search over layouts: predictions for all that the rules of `train` accept, and why others are left out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llava_mcore.config.rules.all_rules import check_run
from llava_mcore.config.rules.parallel import OVERLAP
from llava_mcore.config.schema import RunConfig
from llava_mcore.plan.balance import balanced_layers, stage_keys
from llava_mcore.plan.hardware.gpus import Gpu
from llava_mcore.plan.layout import RunLayout, layout_of
from llava_mcore.plan.material import packs_for
from llava_mcore.plan.predict import Prediction, predict
from llava_mcore.plan.seconds import Machine
from llava_mcore.plan.sizes.model import Model
from llava_mcore.plan.work import PackWork, Sample

Changes = Mapping[str, object]
VARIED = ("moments", "fp8", "adapter", "tower")
"""Options that change the results of training, and are varied only on request."""
MOST_MICRO_BATCH = 16
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
CP = "parallel.context_parallel_size"
LONG = 32768
"""Sequences from which on processes may divide their tokens."""
TOKENS_PER_RANK = 8192
"""Tokens that each of these processes then has at least."""
COMM_OVERLAP = "parallel.tp_comm_overlap"
TOWERS = "parallel.vision_data_parallel"
CHUNK = "parallel.num_layers_per_virtual_pipeline_stage"
SIZE = "training.micro_batch_size"
LORA_RANK = 64


@dataclass(frozen=True)
class Candidate:
    """A layout as values of the configuration that differ from the given one, and what it takes."""

    changes: Changes
    run: RunConfig
    prediction: Prediction


@dataclass
class SearchResult:
    """The result of a search: candidates that fit by falling tokens/s, those that do not by rising memory, and refused
    ones by the rule's message."""

    fitting: list[Candidate] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


@dataclass
class Searched:
    """A model and its data on so many GPUs of a kind. `run`: where the search begins."""

    model: Model
    samples: Sequence[Sample]
    run: RunConfig
    world: int
    machine: Machine
    vary: Sequence[str] = ()
    packs: dict[tuple[object, ...], PackWork] = field(default_factory=dict)
    balanced: dict[RunLayout, tuple[int, ...]] = field(default_factory=dict)

    @property
    def gpu(self) -> Gpu:
        """The kind of GPU."""
        return self.machine.gpu

    def packs_of(self, layout: RunLayout) -> PackWork:
        """Return the work of packs, computed once for all layouts that share it."""
        size = 1 if layout.packing else layout.micro_batch_size
        dividing = (layout.tower_ranks, layout.micro_batch_size if layout.tower_ranks > 1 else 0)
        key = (layout.seq_length, layout.packing, layout.computed_multiple, size, layout.cp, *dividing)
        if key not in self.packs:
            self.packs[key] = packs_for(self.model, layout, self.samples)
        return self.packs[key]

    def predict(self, run: RunConfig) -> Prediction:
        """Predict a configuration that the rules accept."""
        layout = layout_of(run, self.world, self.model.decoder.num_layers)
        return predict(self.model, layout, self.packs_of(layout), self.machine)

    def problems(self, run: RunConfig) -> list[str]:
        """Return why `train` would refuse it on these GPUs, except what a plan does not need: folders and a length."""
        training = run.training
        length = {} if training.train_samples or training.train_epochs else {"train_iters": training.train_iters or 1}
        checkpoint = run.checkpoint.model_copy(
            update={"save_dir": run.checkpoint.save_dir or Path("runs"), "hf_dir": None, "load": None, "init": False}
        )
        full = run.model_copy(update={"checkpoint": checkpoint, "training": training.model_copy(update=length)})
        return check_run(full, self.model.dims(), self.world, device_available=True)


def search(searched: Searched) -> SearchResult:
    """Predict every layout."""
    result = SearchResult()
    seen: set[tuple[tuple[str, object], ...]] = set()
    for changes in choices(searched):
        key = tuple(sorted(changes.items(), key=lambda item: item[0]))
        if key in seen:
            continue
        seen.add(key)
        run = changed(searched.run, changes)
        problems = searched.problems(run)
        if problems:
            result.refused[problems[0]] += 1
            continue
        candidate = Candidate(changes, run, searched.predict(run))
        fits = candidate.prediction.memory <= searched.gpu.usable
        (result.fitting if fits else result.too_large).append(candidate)
    result.fitting.sort(key=lambda x: (-round(x.prediction.tokens_per_second), x.prediction.memory))
    result.too_large.sort(key=lambda x: x.prediction.memory)
    return result


def changed(run: RunConfig, changes: Changes) -> RunConfig:
    """Return the configuration with other values, which have the right types."""
    sections: dict[str, dict[str, object]] = {}
    for dotted, value in changes.items():
        section, _, leaf = dotted.partition(".")
        sections.setdefault(section, {})[leaf] = value
    return run.model_copy(update={name: vars(run)[name].model_copy(update=x) for name, x in sections.items()})


def choices(searched: Searched) -> Iterator[Changes]:
    """Yield the layouts to try, as changes of the run's values. Rules and memory decide which remain."""
    world, run = searched.world, searched.run
    for tp, cp in itertools.product(_powers(min(world, searched.gpu.per_node)), _context_sizes(run)):
        for pp in range(1, min(world // (tp * cp), searched.model.decoder.num_layers) + 1):
            if world % (tp * cp * pp) or (pp > 1 and pp & (pp - 1) and searched.model.decoder.num_layers % pp):
                continue
            dp = world // (tp * cp * pp)
            sizes = [n for n in _powers(MOST_MICRO_BATCH) if run.training.global_batch_size % (n * dp) == 0]
            if not sizes:  # the rule says why
                sizes = [1]
            for size, options in itertools.product(sizes, list(_options(searched, tp, cp, pp))):
                base = {TP: tp, CP: cp, PP: pp, SIZE: size, "parallel.balance": "none", **options}
                base[COMM_OVERLAP] = tp > 1 and _can_overlap(searched, base)
                yield from ({**base, **stages} for stages in _stages(searched, base))


def _can_overlap(searched: Searched, base: Changes) -> bool:
    """Return whether the rules allow messages beside products."""
    problems = searched.problems(changed(searched.run, {**base, COMM_OVERLAP: True}))
    return not any(problem.startswith(OVERLAP) for problem in problems)


def _context_sizes(run: RunConfig) -> list[int]:
    """Return how many processes may divide samples: several only if these are long, or if the run says so."""
    length = run.data.seq_length
    most_ranks = length // TOKENS_PER_RANK if length >= LONG else 1
    return _powers(max(run.parallel.context_parallel_size, most_ranks))


def _powers(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length()) if 1 << n <= limit]


def _options(searched: Searched, tp: int, cp: int, pp: int) -> Iterator[Changes]:
    """Yield values of the options beside the sizes of groups."""
    run, vary, decoder = searched.run, searched.vary, searched.model.decoder
    graphs = run.data.packing and pp == cp == 1 and decoder.experts is None
    trains_tower = not run.model.freeze_vision_model and not run.adapter.is_on
    axes: list[list[Changes]] = [
        [{"parallel.sequence_parallel": tp > 1, "parallel.use_distributed_optimizer": True}],
        [{"model.recompute": x} for x in ("none", "selective", "full")],
        [{"model.cuda_graphs": x, "model.cuda_graphs_vision": False} for x in (False, graphs)],
    ]
    axes.append([{TOWERS: x} for x in (("off", "on") if tp > 1 else ("auto",))])
    towers: list[Changes] = [{"model.freeze_vision_model": run.model.freeze_vision_model}]
    if "tower" in vary and not run.adapter.is_on:
        towers = [{"model.freeze_vision_model": x} for x in (True, False)]
        trains_tower = True
    divided = ("none", "optim_grads_params") if pp == 1 and searched.world > tp * cp else ("none",)
    if decoder.experts is None:
        axes.append([{"parallel.fsdp": x, "parallel.hsdp_replicas": 1} for x in divided])
    axes.append(towers)
    axes.append([{"model.recompute_vision": x} for x in (("none", "full") if trains_tower else ("none",))])
    axes.append([{"parallel.expert_model_parallel_size": ep} for ep in _expert_sizes(searched, pp)])
    if "moments" in vary:
        axes.append([moments(x) for x in ("fp32", "bf16")])
    if "fp8" in vary:
        axes.append([{"training.fp8": x} for x in (False, True)])
    if "adapter" in vary:
        rank = run.adapter.r or LORA_RANK
        axes.append([{"adapter.r": None}, {"adapter.r": rank}, {"adapter.r": rank, "adapter.quantize": "nf4"}])
    for parts in itertools.product(*axes):
        options: dict[str, object] = {}
        for part in parts:
            options |= part
        # An option without effect is left out, where the rules would refuse the layout.
        if options["model.cuda_graphs"] and options["model.recompute"] != "none":
            continue
        in_fp8 = options.get("training.fp8", run.training.fp8)
        if options.get("parallel.fsdp", "none") != "none" and (options["model.cuda_graphs"] or in_fp8):
            continue
        if options["model.freeze_vision_model"] and options["model.recompute_vision"] != "none":
            continue
        yield options


def _expert_sizes(searched: Searched, pp: int) -> list[int]:
    """Return how many ranks may divide the experts; whole experts are faster than parts of them."""
    experts, gpu = searched.model.decoder.experts, searched.gpu
    if experts is None:
        return [1]
    ranks = searched.world // pp
    return [ep for ep in _powers(min(experts.count, ranks, 2 * gpu.per_node)) if ranks % ep == 0]


def moments(kind: str) -> Changes:
    """Return the values for moments of a number format."""
    return {
        "optimizer.use_precision_aware_optimizer": kind != "fp32",
        "optimizer.exp_avg_dtype": kind,
        "optimizer.exp_avg_sq_dtype": kind,
    }


def _stages(searched: Searched, base: Changes) -> Iterator[Changes]:
    """Yield divisions of the layers: equal, balanced, and interleaved."""
    pp, num_layers = base[PP], searched.model.decoder.num_layers
    assert isinstance(pp, int)
    equal: Changes = {**stage_keys((1,)), CHUNK: None}
    if pp == 1:
        yield equal
        return
    if num_layers % pp == 0:
        yield equal
        each = num_layers // pp
        yield from ({**equal, CHUNK: each // v} for v in (2, 4) if each % v == 0)
    run = changed(searched.run, {**base, **equal})
    layout = layout_of(run, searched.world, num_layers // pp * pp)
    full = [num_layers // pp] * (pp - 1)
    layout = replace(layout, layers=(*full, num_layers - sum(full)))
    # The optimizer's state takes no time, so that layouts with another one have the same stages.
    key = replace(layout, state_bytes=0.0, matrix_state_bytes=0.0)
    if key not in searched.balanced:
        searched.balanced[key] = balanced_layers(searched.model, layout, searched.packs_of(layout), searched.machine)
    layers = searched.balanced[key]
    if len(set(layers)) > 1:
        yield {**stage_keys(layers), CHUNK: None}
