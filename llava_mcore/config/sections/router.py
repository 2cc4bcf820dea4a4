"""Configuration of the routers in models with mixtures of experts."""

from __future__ import annotations

from pydantic import Field

from llava_mcore.config.sections.base import Section


class RouterConfig(Section):
    """How routers of mixtures of experts are trained."""

    aux_loss_coef: float = Field(0.0, ge=0, le=100)
    """Weight of the load-balancing loss of every layer, as Megatron defines it: the number of experts times the sum,
    over experts, of an expert's share of a micro-batch's choices times its mean probability. Off by default, as in
    Hugging Face's fine-tuning; router_aux_loss_coef in config.json is not read."""
    z_loss_coef: float = Field(0.0, ge=0, le=100)
    """Weight of the mean square of the log-sum-exp of the router's logits, which keeps them small (ST-MoE)."""
    force_balance: bool = False
    """Choose experts at random, to measure speed with an even load. Such a run learns nothing useful."""
