"""Context parallelism: what ranks that divide the tokens of samples send each other, and what they keep of it.

Each rank has the same number of tokens and of pairs in causal attention (two chunks of every sample, see
`parallel.context`), so that the work of a rank is that of a pack, divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llava_mcore.plan.layout import RunLayout
from llava_mcore.plan.sizes.model import Decoder, Model
from llava_mcore.plan.work import Work

if TYPE_CHECKING:
    from llava_mcore.plan.seconds import Machine

LATENCY = 2e-5
"""Seconds until a message of a ring arrives, however short it is."""


def keys_and_values(d: Decoder, layout: RunLayout) -> float:
    """Return the bytes of a token's keys and values on a tensor-parallel rank, in half precision."""
    return 2 * 2 * d.groups * d.head_dim / layout.tp


def exposed_messages(
    model: Model, layout: RunLayout, work: Work, machine: Machine, scores: float
) -> tuple[float, float]:
    """Return the seconds of both passes of a layer in which a rank waits for tokens of the others.

    Args:
        work: of a rank.
        scores: seconds of attention's products, forward.
    """
    d, cp = model.decoder, layout.cp
    if cp == 1:
        return 0.0, 0.0
    across = layout.tp * cp > machine.gpu.per_node
    tokens, of_keys = work.computed, work.computed * keys_and_values(d, layout)
    if layout.cp_comm_type == "a2a":  # all of a layer's tensors for other heads of them, and back
        once = machine.collective(2 * tokens * (d.qkv + d.queries) / layout.tp, cp, across_nodes=across)
        forward, backward = once, once
    elif layout.cp_comm_type == "all_gather":  # backward once more, and the sum of the gradients
        forward = machine.collective(cp * of_keys, cp, across_nodes=across)
        backward = 2 * forward
    else:  # a ring: while a part is multiplied the next one arrives, backward with the gradients of the last one
        link = (machine.gpu.network if across else machine.gpu.link) * machine.fit.link
        size = cp // layout.cp_a2a_size
        message, step = of_keys / link + LATENCY, scores / size
        forward = (size - 1) * max(0.0, message - step)
        backward = (size - 1) * max(0.0, 2 * message - 2.5 * step)
        if layout.cp_comm_type == "a2a+p2p":  # of neighbors' tokens a part of the heads goes around
            near, tensors = layout.cp_a2a_size, 2 * tokens * (d.qkv + d.queries) / layout.tp
            once = machine.collective(tensors, near, across_nodes=layout.tp * near > machine.gpu.per_node)
            forward, backward = forward + once, backward + once
    # Delta nets get all tokens of a part of the heads.
    delta = machine.collective(2 * tokens * (d.delta_in + d.delta_out) / layout.tp, cp, across_nodes=across)
    share = d.delta_share
    return forward + share * (delta - forward), backward + share * (delta - backward)


def buffers(model: Model, layout: RunLayout, work: Work) -> float:
    """Return the bytes of what a layer receives: one layer's at a time."""
    if layout.cp == 1:
        return 0.0
    d, of_keys = model.decoder, work.computed * keys_and_values(model.decoder, layout)
    if layout.cp_comm_type == "a2a":
        return 2 * work.computed * (d.qkv + d.queries) / layout.tp
    # The part that is multiplied and the one that arrives, each with its gradients; or all of them.
    return of_keys * (2 * layout.cp if layout.cp_comm_type == "all_gather" else 4)
