"""Transformer Engine has a layer's norms inside the linear layers after them; its names are those of checkpoints."""

FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Name of a norm of its own, with torch's layers -> its name in checkpoints."""
