"""Everything a training process holds, built from the run's configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.attention import Attention
from transformers import PretrainedConfig

from llava_mcore.adapters.adaptation import AdapterSetup, adapter_setup_of
from llava_mcore.adapters.factors import adapter_state
from llava_mcore.checkpoint.choose_start import StartPoint
from llava_mcore.checkpoint.dist import model_state
from llava_mcore.compat.megatron.fsdp import ShardedModel
from llava_mcore.compat.transformer_engine import open_user_buffers, overlap_full_passes
from llava_mcore.config.schema import RunConfig
from llava_mcore.media.batch_fields import Fields
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.attention.flash import describe_flash_attention
from llava_mcore.models.connectors.perceiver_resampler import PerceiverLayer
from llava_mcore.models.language.router import ExpertLoads, Router, RouterLosses
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import PARTS, count_parameters, set_trained, trained_parameters
from llava_mcore.models.vision.replicated import copy_from_first_rank
from llava_mcore.parallel.context import across_nodes
from llava_mcore.parallel.groups import Groups, initialize, set_virtual_stages, sum_over_ranks
from llava_mcore.parallel.random import make_deterministic, seed_everything, seed_replicas
from llava_mcore.parallel.together import raise_together
from llava_mcore.training.graphs.layer_graphs import LayerGraphs
from llava_mcore.training.graphs.model_graphs import model_graphs
from llava_mcore.training.load_model import load_adapted, load_checkpoint
from llava_mcore.training.loss_terms import loss_terms
from llava_mcore.training.model_options import model_options
from llava_mcore.training.optimization.data_parallel import (
    DataParallelModel,
    TowerGradients,
    data_parallel,
    fuse_weight_gradients,
)
from llava_mcore.training.optimization.muon_matrices import find_matrices
from llava_mcore.training.optimization.optimizer import build_optimizer, build_scheduler

logger = logging.getLogger(__name__)


def join_world(run: RunConfig) -> Groups:
    """Connect to the other ranks and seed the random generators."""
    if run.training.deterministic:
        make_deterministic()
    parallel = run.parallel
    assert parallel.backend is not None, "the launcher resolves the backend"
    groups = initialize(
        backend=parallel.backend,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        cp_a2a_size=parallel.cp_a2a_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        sharding_replicas=parallel.hsdp_replicas,
        timeout_seconds=run.faults.timeout,
    )
    seed_everything(run.training.seed)
    return groups


@dataclass(frozen=True)
class Trainer:
    """The model with its optimizer and schedule.

    chunks: this rank's model, wrapped. trained_parts: parts with trained parameters, on any rank. loaded_from: the
    checkpoint whose weights it has begun with. loads: of a model with experts. whole_state: the state of the models
    before their parameters were divided (--fsdp), whose values must not be read.
    """

    run: RunConfig
    groups: Groups
    hf: PretrainedConfig
    chunks: Sequence[DataParallelModel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    trained_parts: frozenset[str]
    loaded_from: Path | None = None
    adapter_setup: AdapterSetup | None = None
    graphs: Sequence[LayerGraphs] = ()
    loads: ExpertLoads | None = None
    whole_state: ShardedStateDict | None = None

    @property
    def fields(self) -> Fields:
        """Return the fields of a micro-batch's media."""
        return architecture_of(self.hf).fields

    @property
    def models(self) -> list[VisionLanguageModel]:
        """Return the bare models, for checkpoints."""
        for chunk in self.chunks:
            if isinstance(chunk, ShardedModel):
                chunk.use_whole_parameters()
        return [unwrap(chunk) for chunk in self.chunks]

    @property
    def replicas_run_together(self) -> bool:
        """Whether a replica that runs one forward pass more than others would wait for them."""
        return self.groups.replicas_share_experts or self.run.parallel.divides_weights

    @property
    def uses_dropout(self) -> bool:
        """Return whether this rank's part of the model, or an adapter, uses dropout in training."""
        modules = [module for model in self.models for module in model.modules()]
        # Other modules have a config too, in which this field may be megatron-core's default.
        rates = [x.config.attention_dropout for x in modules if isinstance(x, Attention | PerceiverLayer)]
        return self.run.adapter.dropout > 0 or any(rates)


def unwrap(chunk: torch.nn.Module) -> VisionLanguageModel:
    """Return the model inside the data-parallel and precision wrappers."""
    inner = chunk
    while not isinstance(inner, VisionLanguageModel):
        inner = inner.get_submodule("module")
    return inner


def build_trainer(
    run: RunConfig, groups: Groups, start: StartPoint, begin: Callable[[str], None] = lambda _: None
) -> Trainer:
    """Build model, optimizer and schedule; load the weights of a checkpoint. A collective call.

    Each part that may fail on one rank alone ends with an agreement: no other rank may wait for this one in a later
    collective call.

    Args:
        begin: called with the name of each phase.
    """
    # The model's description, its trained parameters, and this rank's part of it.
    begin("building the model")
    hf, adapter_setup = raise_together(groups, lambda: _read_model(run, start))
    trained = trained_parameters(hf, run.model) if adapter_setup is None else adapter_setup.trained
    models = raise_together(groups, lambda: build_models(run, groups, hf, trained, initialize=start.checkpoint is None))
    # The weights of the checkpoint; with adapters those of the base, then the adapters.
    begin("loading the weights")
    if adapter_setup is not None:
        quantize, seed = run.adapter.quantize, run.training.seed
        load_adapted(models, adapter_setup, groups, quantize=quantize, multiplies_in_fp8=run.training.fp8, seed=seed)
    elif start.checkpoint is not None:
        load_checkpoint(models, start.checkpoint, groups)
    # Data parallelism, optimizer and schedule.
    begin("building the optimizer")
    whole_state = None if run.parallel.fsdp == "none" else saved_state(models, adapter_setup, is_loading=False)
    # The first chunk's buckets overlap with its own backward pass; those of the others with earlier chunks' passes.
    chunks = raise_together(
        groups, lambda: [data_parallel(run, groups, x, buckets=i == 0) for i, x in enumerate(models)]
    )
    optimizer, scheduler = raise_together(groups, lambda: _build_optimizer(run, hf, models, chunks))
    # From here on, data-parallel ranks draw different dropout masks.
    seed_replicas(run.training.seed)
    _log_parts(models, groups)
    trained_parts = frozenset(name.partition(".")[0] for name, is_trained in trained.items() if is_trained)
    if adapter_setup is not None:
        trained_parts = adapter_setup.trained_parts
    graphs = model_graphs(models[0], chunks[0], run) if run.model.cuda_graphs else []
    return Trainer(
        run,
        groups,
        hf,
        chunks,
        optimizer,
        scheduler,
        trained_parts,
        start.checkpoint,
        adapter_setup,
        graphs,
        ExpertLoads.of(models),
        whole_state,
    )


def saved_state(
    models: Sequence[VisionLanguageModel], adapter_setup: AdapterSetup | None, *, is_loading: bool
) -> ShardedStateDict:
    """Return the sharded state of a rank's chunks; with adapters, only that of the adapters and other trained
    parameters."""
    if adapter_setup is None:
        return model_state(models, is_loading=is_loading)
    return adapter_state(models, adapter_setup.own_names, is_loading=is_loading)


def _read_model(run: RunConfig, start: StartPoint) -> tuple[PretrainedConfig, AdapterSetup | None]:
    """Read the descriptions of the model and its adapters."""
    hf = load_hf_config(start.hf_dir)
    return hf, adapter_setup_of(run.adapter, hf, start.checkpoint, run.checkpoint.load)


def _build_optimizer(
    run: RunConfig,
    hf: PretrainedConfig,
    models: Sequence[VisionLanguageModel],
    chunks: Sequence[DataParallelModel],
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build the optimizer and schedule of the model's chunks; a collective call."""
    divides = run.parallel.whole_towers
    matrices = find_matrices(models, hf, whole_towers=divides) if run.optimizer.name == "muon" else None
    optimizer = build_optimizer(run, chunks, matrices)
    for chunk in chunks:
        if isinstance(chunk, ShardedModel):
            chunk.begin()
    scheduler = build_scheduler(run, optimizer)
    no_sync = [chunk.no_sync for chunk in chunks]
    finalize = TowerGradients(chunks, models).finalize if divides else finalize_model_grads
    for model in models:
        model.config.finalize_model_grads_func = finalize
        model.config.grad_scale_func = optimizer.scale_loss
        model.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return optimizer, scheduler


def build_models(
    run: RunConfig, groups: Groups, hf: PretrainedConfig, trained: Mapping[str, bool], *, initialize: bool
) -> list[VisionLanguageModel]:
    """Build this rank's part of the model: one chunk, or several if interleaved.

    Args:
        trained: for every parameter of the whole model, whether it is trained.
    """
    # One model, or the chunks of an interleaved pipeline. Only the first has the tower, only the last the loss.
    options = model_options(run, groups, hf, initialize=initialize)
    num_virtual = options.stages.virtual
    set_virtual_stages(num_virtual)
    tokens = run.training.micro_batch_size * run.data.seq_length
    if options.tp_comm_overlap:
        width = hf.text_config.hidden_size
        open_user_buffers(tokens, width, groups.tp_size, options.params_dtype, fp8=options.fp8 is not None)
    models = [
        VisionLanguageModel(
            hf,
            options,
            pre_process=groups.is_first_stage and i == 0,
            post_process=groups.is_last_stage and i == (num_virtual or 1) - 1,
            vp_stage=None if num_virtual is None else i,
        )
        for i in range(num_virtual or 1)
    ]
    # Settings that depend on the run, not only on the model.
    for model in models:
        set_trained(model, trained)
        if options.tp_comm_overlap:
            overlap_full_passes(model.language_model.decoder, tokens, groups.tp_size)
        has_sum = run.parallel.fsdp == "none"  # of gradients over micro-batches, whole and all the time
        if options.transformer_impl == "transformer_engine" and (has_sum or run.parallel.divides_weights):
            fuse_weight_gradients(model, experts=has_sum)
        if has_sum:
            model.language_model.add_to_main_grad(scales_loss=options.params_dtype == torch.float16)
        if model.post_process:
            model.language_model.output_layer.terms = loss_terms(run)
        for router in (x for x in model.modules() if isinstance(x, Router)):
            router.losses = RouterLosses(run.router.aux_loss_coef, run.router.z_loss_coef)
        if not options.plain_linears:  # else it is quantized first
            model.to(groups.device)
        if initialize and model.pre_process and options.vision_data_parallel:
            copy_from_first_rank(model.vision_model)
    return models


def _log_parts(models: Sequence[VisionLanguageModel], groups: Groups) -> None:
    """Log the number of trained parameters of each part; a collective call."""
    counts = count_parameters(models, first_tp_rank=groups.tp_rank == 0)
    counts = sum_over_ranks(groups, counts if groups.data_parallel.rank() == 0 else [0] * len(counts))
    rows = [(part, counts[2 * i], counts[2 * i + 1]) for i, part in enumerate(PARTS)]
    rows.append(("all", sum(counts[::2]), sum(counts[1::2])))
    lines = [f"{part:<18} {total:>16,} {trained:>16,} {100 * trained / total:>6.1f} %" for part, total, trained in rows]
    logger.info("%s", "\n".join([f"{'part':<18} {'parameters':>16} {'trained':>16}", *lines]))
    config = models[0].config
    tower = models[0].vision_model if models[0].pre_process else None
    scales = ", experts with a scale for each token and each row of a matrix" if config.num_moe_experts else ""
    fp8 = ", FP8" + (", also of the tower" if tower and tower.config.fp8 else "") + scales if config.fp8 else ""
    by_flash = describe_flash_attention({"decoder": models[0].language_model, "tower": tower})
    logger.info("layers: %s%s%s", config.transformer_impl, by_flash, fp8)
    experts = f", experts: ep {groups.ep_size} x etp {groups.etp_size}" if config.num_moe_experts else ""
    context = f" x cp {groups.cp_size}" if groups.cp_size > 1 else ""
    sizes = f"tp {groups.tp_size}{context} x pp {groups.pp_size} x dp {groups.dp_size}{experts}"
    logger.info("layout: %s on %s", sizes, groups.device)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", groups.world_size))
    if (crossing := across_nodes(groups.tp_size, groups.cp_size, groups.world_size, per_node)) is not None:
        logger.warning("%s", crossing)
    if groups.cp_size > 1 and models[0].pre_process and not models[0].divides_media:
        logger.warning(
            "each of the %d context-parallel processes computes all images: --vision-data-parallel divides them over "
            "--tp x --cp processes",
            groups.cp_size,
        )
