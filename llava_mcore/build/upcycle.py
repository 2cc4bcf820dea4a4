"""Upcycling (arXiv 2212.05055): a dense language model becomes one with experts that computes the same at first.

Every expert is a copy of the layer's MLP. The weights of the chosen ones add up to 1, so whatever the router chooses,
the mixture's output is the MLP's. Training makes the experts differ.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from llava_mcore.build import language
from llava_mcore.build.options import Say
from llava_mcore.build.sources import ModelSource
from llava_mcore.errors import ConfigError

DENSE = "qwen3"
"""The kind of model that another one with experts exists for, with the same attention."""
_OF_DENSE = ("architectures", "layer_types", "max_window_layers", "model_type", "transformers_version")


def require_dense(config: PretrainedConfig, source: ModelSource, experts: tuple[int, int] | None) -> None:
    """Raise ConfigError for a model that cannot be upcycled, or for numbers that make no mixture.

    Args:
        experts: E and K: of E experts, each token is computed by K; None: nothing is asked for.
    """
    if experts is None:
        return
    num_experts, chosen = experts
    if not 2 <= chosen <= num_experts:
        raise ConfigError(
            f"--upcycle {num_experts},{chosen}: expected E,K with 2 <= K <= E: of E experts, K compute each token"
        )
    if config.model_type != DENSE:
        raise ConfigError(
            f"--upcycle: {source} is a {config.model_type}; of the dense models, only {DENSE} has a class with experts "
            "and the same attention"
        )


def load_language_model(
    source: ModelSource, dtype: torch.dtype | str, experts: tuple[int, int] | None, *, seed: int, say: Say
) -> PreTrainedModel:
    """Read the causal language model with its head, and give it experts if they are asked for.

    Raises:
        ConversionError: it is unreadable, or weights are missing.
    """
    model = language.load_language_model(source, dtype, say)
    if experts is None:
        return model
    say("  MLPs: {} copies of each, {} of them for each token; routers are random".format(*experts))
    return upcycled(model, experts, seed=seed)


def upcycled(dense: PreTrainedModel, experts: tuple[int, int], *, seed: int) -> PreTrainedModel:
    """Return a Qwen3MoeForCausalLM that computes what `dense` does; the experts of a layer share memory.

    Args:
        experts: E and K, see `require_dense`.
        seed: of the routers' weights, normal with the config's standard deviation.
    """
    config = _config(dense.config, *experts)
    weights: dict[str, Tensor] = dict(dense.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for i in range(config.num_hidden_layers):
        mlp = f"model.layers.{i}.mlp."
        gate, up, down = (weights.pop(f"{mlp}{x}_proj.weight") for x in ("gate", "up", "down"))
        weights[mlp + "experts.gate_up_proj"] = torch.cat([gate, up]).expand(config.num_experts, -1, -1)
        weights[mlp + "experts.down_proj"] = down.expand(config.num_experts, -1, -1)
        router = torch.randn(config.num_experts, config.hidden_size, generator=generator) * config.initializer_range
        weights[mlp + "gate.weight"] = router.to(gate.dtype)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    inner = cast(Any, model.model)
    inner.rotary_emb = Qwen3MoeRotaryEmbedding(config)  # its buffers are in no file
    model.tie_weights()
    model.generation_config = dense.generation_config
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    return cast(PreTrainedModel, cast(nn.Module, model).eval())


def _config(dense: PretrainedConfig, num_experts: int, chosen: int) -> Qwen3MoeConfig:
    values = {name: value for name, value in dense.to_dict().items() if name not in _OF_DENSE}
    return Qwen3MoeConfig(
        **values,
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=dense.intermediate_size,
        norm_topk_prob=True,
    )
