"""A layout of a run: what of its configuration memory and time depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from llava_mcore.config.rules.adapter import trains_projection, trains_tower
from llava_mcore.config.rules.all_rules import loader_multiple, pad_multiple
from llava_mcore.config.schema import ParallelConfig, RunConfig
from llava_mcore.config.sections.adapter import RANK_KEYS, AdapterConfig

Recompute = Literal["none", "selective", "full"]
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Adapter:
    """Ranks of LoRA in the parts, 0: none. `targets`: of the decoder's linear layers, the ends of their names.
    `experts`: rank in each of the experts."""

    language: int = 0
    vision: int = 0
    projection: int = 0
    targets: tuple[str, ...] = ("all-linear",)
    quantize: Literal["none", "nf4", "fp8"] = "none"
    experts: int = 0

    @property
    def is_on(self) -> bool:
        """Whether the model is frozen beside adapters."""
        return bool(self.language or self.vision or self.projection or self.experts)


@dataclass(frozen=True)
class RunLayout:
    """One way to run a configuration on a number of GPUs.

    `layers`: decoder layers of each stage; `virtual`: chunks that a stage consists of. `state_bytes`: of the optimizer
    on the GPU per trained parameter; `matrix_state_bytes`: per weight of a trained linear layer, where the optimizer
    keeps less of these (Muon); `muon_steps`: Newton-Schulz iterations of an update, 0 for AdamW. `computed_multiple`:
    what the number of tokens is padded to.
    """

    world: int
    tp: int
    pp: int
    layers: tuple[int, ...]
    micro_batch_size: int
    num_micro_batches: int
    virtual: int = 1
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False
    divides_images: bool = False
    """Whether the ranks of a stage have the whole tower each, and divide the images."""
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    state_bytes: float = 12.0
    matrix_state_bytes: float = 12.0
    muon_steps: int = 0
    offloaded_bytes: float = 0.0
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = ("mlp",)
    recompute_block: int | None = None
    recompute_unit: int = 1
    recompute_vision: bool = False
    fp8: Literal["none", "delayed", "tensorwise", "blockwise"] = "none"
    fp8_vision: bool = False
    graphs: bool = False
    graphs_vision: bool = False
    trains_language: bool = True
    trains_expanded: bool = False
    """Whether only the inserted layers of the language model are trained."""
    trains_tower: bool = False
    trains_projection: bool = True
    adapter: Adapter = Adapter()
    weight_bytes: int = 2
    packing: bool = True
    seq_length: int = 4096
    computed_multiple: int = 8
    vocab_multiple: int = 128
    ep: int = 1
    etp: int = 1
    cp: int = 1
    cp_comm_type: Literal["p2p", "a2a", "all_gather", "a2a+p2p"] = "p2p"
    cp_a2a_size: int = 1
    fsdp: Literal["none", "optim", "optim_grads", "optim_grads_params"] = "none"
    replicas: int = 1
    """Groups of data-parallel ranks that each have all shards (--hsdp)."""

    @property
    def whole_towers(self) -> bool:
        """Whether tensor-parallel ranks have the whole tower each, in place of a part of it."""
        return self.divides_images and self.tp > 1

    @property
    def tower_ranks(self) -> int:
        """Ranks that divide the images."""
        return self.tp * self.cp if self.divides_images else 1

    @property
    def shards(self) -> int:
        """Ranks that divide what --fsdp or the distributed optimizer divides."""
        return self.dp * self.cp // self.replicas

    @cached_property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Replicas of an expert."""
        return max(1, self.world // (self.pp * self.ep * self.etp))

    def padded_vocab(self, vocab: int) -> int:
        """Return the rows of the embedding with padding."""
        multiple = self.vocab_multiple * self.tp
        return math.ceil(vocab / multiple) * multiple

    def in_flight(self, stage: int) -> float:
        """Return how many micro-batches' activations a stage keeps at most, of its whole length.

        Interleaved, megatron-core starts (pp - stage - 1) * 2 + (chunks - 1) * pp passes of a chunk, and one more,
        before the first backward pass.
        """
        if self.virtual > 1:
            passes = (self.pp - stage - 1) * 2 + (self.virtual - 1) * self.pp + 1
            return min(passes, self.num_micro_batches * self.virtual) / self.virtual
        return min(self.pp - stage, self.num_micro_batches)


def stage_layers(parallel: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    """Return the decoder layers of each stage. `check_stages` says whether they divide."""
    pp = parallel.pipeline_model_parallel_size
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if pp == 1:
        return (num_layers,)
    others = pp - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    each = rest // others if others else 0
    middle = [each] * others
    return (*((first,) if first is not None else ()), *middle, *((last,) if last is not None else ()))


def layout_of(run: RunConfig, world: int, num_layers: int) -> RunLayout:
    """Return the layout of a configuration on so many GPUs. `num_layers`: of the decoder."""
    # What several fields follow from.
    parallel, model, training, adapter = run.parallel, run.model, run.training, run.adapter
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    layers = stage_layers(parallel, num_layers)
    chunk = parallel.num_layers_per_virtual_pipeline_stage
    in_device, in_host = _state(run)
    full = model.recompute == "full"
    ranks = max(1, world // parallel.replica_size)
    return RunLayout(
        world=world,
        # Stages and micro-batches.
        tp=tp,
        pp=pp,
        layers=layers,
        micro_batch_size=training.micro_batch_size,
        num_micro_batches=max(1, training.global_batch_size // (training.micro_batch_size * ranks)),
        virtual=max(1, layers[0] // chunk) if chunk and pp > 1 else 1,
        # Who has which part of the model and of the optimizer.
        sequence_parallel=parallel.sequence_parallel and tp > 1,
        tp_comm_overlap=parallel.tp_comm_overlap and tp > 1,
        divides_images=parallel.divides_images,
        distributed_optimizer=parallel.divides_optimizer,
        fsdp=parallel.fsdp,
        replicas=parallel.hsdp_replicas,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        state_bytes=in_device,
        matrix_state_bytes=in_device - (4.0 if run.optimizer.name == "muon" else 0.0),
        muon_steps=run.optimizer.muon_steps if run.optimizer.name == "muon" else 0,
        offloaded_bytes=in_host,
        # What is computed, and how.
        recompute=model.recompute,
        recompute_modules=model.recompute_modules,
        recompute_block=model.recompute_num_layers if full and model.recompute_method == "block" else None,
        recompute_unit=model.recompute_num_layers if full and model.recompute_method == "uniform" else 1,
        recompute_vision=model.recompute_vision == "full",
        fp8=training.fp8_recipe if training.fp8 else "none",
        fp8_vision=training.fp8_vision,
        graphs=model.cuda_graphs,
        graphs_vision=model.cuda_graphs_vision,
        # What is trained.
        trains_language=not adapter.is_on and not model.freeze_language_model,
        trains_expanded=model.train_expanded,
        trains_tower=not adapter.is_on and trains_tower(run),
        trains_projection=not adapter.is_on and trains_projection(run),
        adapter=_adapter_of(adapter),
        weight_bytes=_BYTES[training.precision or "bf16"],
        # Tokens of a pass, and who divides them.
        packing=run.data.packing,
        seq_length=run.data.seq_length,
        computed_multiple=loader_multiple(run) if run.has_fixed_shapes else pad_multiple(run),
        vocab_multiple=model.make_vocab_size_divisible_by,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
        cp=parallel.context_parallel_size,
        cp_comm_type=parallel.cp_comm_type or "p2p",
        cp_a2a_size=parallel.cp_a2a_size or 1,
    )


def _adapter_of(adapter: AdapterConfig) -> Adapter:
    language, vision, projection, experts = (adapter.ranks.get(part, 0) for part in RANK_KEYS)
    return Adapter(language, vision, projection, adapter.targets, adapter.quantize, experts)


def _state(run: RunConfig) -> tuple[float, float]:
    """Return the optimizer's bytes per trained parameter on the GPU and in the host's memory."""
    optimizer = run.optimizer
    moments: Mapping[str, int] = _BYTES
    if (run.training.precision or "bf16") == "fp32":
        return 8.0, 0.0
    state = 12.0
    if optimizer.use_precision_aware_optimizer:
        state = 4.0 + moments[optimizer.exp_avg_dtype] + moments[optimizer.exp_avg_sq_dtype]
    away = optimizer.cpu_offload_fraction if optimizer.use_precision_aware_optimizer and optimizer.cpu_offload else 0.0
    return state * (1 - away), state * away
