"""Fractions of the published peaks that are reached, and other constants that were fitted to measurements.

Fitted to the rows that `benchmarks/plan_check.py` names, measured on H200 and H100. `calibrate` replaces those that it
can measure on the GPUs at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from llava_mcore.plan.layout import RunLayout


@dataclass(frozen=True)
class Efficiency:
    """Constants of the model of a GPU.

    Fractions of peaks: `products`, `products_fp8` of large matrix products, of which half would remain if the shortest
    dim were `half_size`; `attention` in long samples, half of it at `half_length` tokens; `lora` of the narrow products
    of adapters; `memory` of the memory's bandwidth; `link` of the links' in collectives. `grouped_fp8`: fraction of the
    rate of FP8 products in those of experts, measured in the forward pass.
    Factors of what is counted: `moved`, `tower_moved` of the bytes of a layer beside its products (fused kernels move
    less than one by one), `quantizing` of those that FP8 adds; `exposed` of the messages between replicas,
    `fsdp_exposed` where weights are divided over them; `tp_overlap` of tensor parallelism's messages that overlap with
    products.
    Seconds of the host: `host_layer`, `host_tower` for the kernels of a layer, both passes; `host_step` for a step. By
    what a decoder layer takes longer: `host_fp8`, `host_lora`, `host_tp`, and `host_experts` with experts;
    `host_graph`: what remains with graphs.
    Of memory: `fragmentation`; `graph_tensors`, `graph_gradients`, `graph_tower`: what graphs keep, in inputs of the
    layers, gradients of their matrices, and activations of the tower.
    """

    products: float = 0.723
    half_size: float = 396.0
    products_fp8: float = 0.695
    half_size_fp8: float = 713.0
    grouped_fp8: float = 0.94
    attention: float = 0.703
    half_length: float = 431.0
    memory: float = 0.87
    link: float = 0.4
    host_layer: float = 0.00453
    host_tower: float = 0.001
    host_fp8: float = 0.998
    host_lora: float = 0.781
    host_tp: float = 0.161
    host_experts: float = 1.65
    host_graph: float = 0.244
    lora: float = 0.0796
    moved: float = 0.5
    quantizing: float = 1.39
    tower_moved: float = 1.15
    host_step: float = 0.0252
    exposed: float = 1.0
    fsdp_exposed: float = 0.35
    tp_overlap: float = 0.5
    fragmentation: float = 0.005
    graph_tensors: float = 1.5
    graph_gradients: float = 0.6
    graph_tower: float = 0.3

    def outside(self, layout: RunLayout) -> float:
        """Return the bytes beside torch's: CUDA's context with its kernels, and a communicator per group."""
        groups = sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.dp))
        return 0.7 * 2**30 + groups * 0.4 * 2**30
