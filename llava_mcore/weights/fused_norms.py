"""Names of norms: Transformer Engine fuses them into the linear layers that follow. Checkpoints use its names."""

FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Name of a separate norm, with torch's layers -> its name in checkpoints."""
