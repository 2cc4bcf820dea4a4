"""Configuration of the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llava_mcore.config.sections.base import Flag, Iterations, Needs, Samples, Section

_WSD = Needs("optimizer.lr_decay_style", value="WSD")
_PRECISION_AWARE = Needs("optimizer.use_precision_aware_optimizer")
_MUON = Needs("optimizer.name", value="muon")


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    flag_group = "training"

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer. muon: Muon for the matrices of linear layers, AdamW for everything else."""
    lr: Annotated[float, Flag("--lr", after="--rampup-batch-size")] = Field(gt=0)
    """Peak learning rate."""
    vision_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the vision tower. Default: lr. The schedule has the same shape, and the same ratio of
    minimum to peak."""
    projection_lr: float | None = Field(None, gt=0)
    """The same for the projection."""
    min_lr: Annotated[
        float, Needs("optimizer.lr_decay_style", other_than="constant", words="a schedule that is not constant")
    ] = Field(0.0, ge=0)
    """Learning rate at the end of the schedule."""
    lr_decay_style: Annotated[Literal["cosine", "linear", "constant", "WSD"], Flag("--lr-decay-style")] = "cosine"
    """Shape of the schedule after the warm-up; WSD: constant, then a decay at the end."""
    lr_wsd_decay_style: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"], Flag("--lr-wsd-decay-style"), _WSD
    ] = "exponential"
    """Shape of the decay at the end of WSD."""
    lr_wsd_decay_iters: Annotated[Iterations | None, Flag("--lr-wsd-decay-iters"), _WSD] = None
    """Iterations of the decay at the end of WSD, which needs this or lr_wsd_decay_samples."""
    lr_wsd_decay_samples: Annotated[Samples | None, Flag("--lr-wsd-decay-samples"), _WSD] = None
    """Samples of the decay at the end of WSD."""
    lr_warmup_fraction: float = Field(0.03, ge=0, lt=1)
    """Fraction of the iterations over which the learning rate rises from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    decay_norms_and_biases: Annotated[bool, Needs("optimizer.weight_decay")] = False
    """Apply weight decay to norms and biases too, not only to matrices and embeddings."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of the running mean of gradients."""
    adam_beta2: Annotated[float, Flag("--adam-beta2")] = Field(0.999, ge=0, lt=1)
    """Decay rate of the running mean of squared gradients."""
    adam_eps: float = Field(1e-8, gt=0)
    """Added to the denominator of the update."""
    muon_momentum: Annotated[float, _MUON] = Field(0.95, ge=0, lt=1)
    """Decay rate of the running mean of gradients that Muon orthogonalizes."""
    muon_nesterov: Annotated[bool, _MUON] = True
    """Use Nesterov momentum."""
    muon_steps: Annotated[int, _MUON] = Field(5, ge=1, le=100)
    """Newton-Schulz iterations per update."""
    muon_coefficients: Annotated[Literal["quintic", "simple", "polar_express", "cans", "aol", "deepseekv4"], _MUON] = (
        "quintic"
    )
    """Coefficients of the Newton-Schulz iteration, by their names in emerging-optimizers."""
    muon_scale: Annotated[Literal["spectral", "shape_scaling", "unit_rms_norm"], _MUON] = "spectral"
    """Scale of an update for a matrix of n outputs and m inputs; spectral: sqrt(max(n, m)), shape_scaling:
    sqrt(max(1, n / m)), unit_rms_norm: sqrt(n / m)."""
    muon_scale_factor: Annotated[float, _MUON] = Field(0.2, gt=0)
    """Another factor; 0.2 with spectral gives updates as large as AdamW's, so lr and weight decay can stay the same."""
    muon_matmul_precision: Annotated[Literal["medium", "high", "highest"], _MUON] = "medium"
    """Precision of the Newton-Schulz iteration: bf16, TF32 or fp32."""
    clip_grad: float = Field(1.0, ge=0)
    """Maximum global gradient norm; 0 turns clipping off."""
    use_precision_aware_optimizer: bool = False
    """On GPUs with the distributed optimizer: store the state in exp_avg_dtype and exp_avg_sq_dtype; weights stay
    in fp32."""
    exp_avg_dtype: Annotated[Literal["fp32", "bf16", "fp16"], _PRECISION_AWARE] = "fp32"
    """Number format of the mean of the gradients, with use_precision_aware_optimizer."""
    exp_avg_sq_dtype: Annotated[Literal["fp32", "bf16", "fp16"], _PRECISION_AWARE] = "fp32"
    """Number format of the mean of the squared gradients, with use_precision_aware_optimizer."""
    cpu_offload: Annotated[bool, _PRECISION_AWARE] = False
    """With use_precision_aware_optimizer: keep the optimizer's state in host memory and update there; slow."""
    cpu_offload_fraction: Annotated[float, Needs("optimizer.cpu_offload")] = Field(1.0, gt=0, le=1)
    """Fraction of the state that cpu_offload moves."""
