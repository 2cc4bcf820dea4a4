"""The prediction of a layout: memory and time of every stage, and of a step."""

from __future__ import annotations

from dataclasses import dataclass

from llava_mcore.plan.hardware.gpus import GIB
from llava_mcore.plan.layout import RunLayout
from llava_mcore.plan.memory import StageMemory, stage_memory
from llava_mcore.plan.parameters import StageParameters, owned, stage_parameters
from llava_mcore.plan.schedule import step_seconds
from llava_mcore.plan.seconds import Machine, Pass, stage_passes
from llava_mcore.plan.sizes.model import Model
from llava_mcore.plan.work import PackWork


@dataclass(frozen=True)
class Stage:
    """Memory and time of a stage."""

    memory: StageMemory
    forward: Pass
    backward: Pass

    @property
    def seconds(self) -> float:
        """Both passes of a micro-batch."""
        return self.forward.total + self.backward.total


@dataclass(frozen=True)
class Prediction:
    """Memory and time of a layout. Seconds of a step: `passes`, of which `bubble` are idle on the average stage,
    exposed `messages` between replicas, and `update` of the weights."""

    layout: RunLayout
    stages: tuple[Stage, ...]
    passes: float
    bubble: float
    messages: float
    update: float
    tokens: float
    """Tokens of a step, without padding."""

    @property
    def seconds(self) -> float:
        """A whole step."""
        return self.passes + self.messages + self.update

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs."""
        return self.tokens / self.seconds

    @property
    def reserved(self) -> float:
        """GiB that torch reserves on the fullest GPU."""
        return max(stage.memory.reserved for stage in self.stages) / GIB

    @property
    def memory(self) -> float:
        """GiB that the fullest GPU must have."""
        return max(stage.memory.total for stage in self.stages) / GIB


def predict(model: Model, layout: RunLayout, packs: PackWork, machine: Machine) -> Prediction:
    """Predict memory and time of a layout."""
    work = packs.mean.times(layout.micro_batch_size)
    stages = []
    for index in range(layout.pp):
        forward, backward = stage_passes(model, layout, work, index, machine)
        stages.append(Stage(stage_memory(model, layout, packs, index, machine.fit), forward, backward))
    ahead = [stage.forward.total for stage in stages]
    back = [stage.backward.total for stage in stages]
    across = layout.tp * layout.cp * layout.pp > machine.gpu.per_node
    hidden = 2 * work.computed * model.decoder.hidden / (layout.tp if layout.sequence_parallel else 1)
    link = (machine.gpu.network if across else machine.gpu.link) * machine.fit.link
    message = hidden / link + 2e-5 if layout.pp > 1 else 0.0
    if layout.pp > 1 and layout.virtual == 1:  # each pass waits for one message; interleaved they overlap
        ahead, back = ([x + message for x in part] for part in (ahead, back))
    count = layout.num_micro_batches
    passes = step_seconds(ahead, back, count, virtual=layout.virtual, message=message)
    busy = count * sum(ahead + back) / layout.pp
    exposed, update = _after_passes(model, layout, machine, passes)
    return Prediction(
        layout=layout,
        stages=tuple(stages),
        passes=passes,
        bubble=passes - busy,
        messages=exposed,
        update=update,
        tokens=work.tokens * count * layout.dp * layout.cp,
    )


def _after_passes(model: Model, layout: RunLayout, machine: Machine, passes: float) -> tuple[float, float]:
    """Return the exposed seconds of summing gradients and gathering weights, and those of the update.

    Args:
        passes: seconds of all passes, beside which messages of weights that are divided travel.
    """
    parameters = max((stage_parameters(model, layout, x) for x in range(layout.pp)), key=lambda x: x.trained)
    trained, of_experts = parameters.trained, parameters.trained_experts
    ranks, fit = layout.dp * layout.cp, machine.fit
    # Replicas are the outermost dimension: their messages cross nodes as soon as there are several.
    across = layout.world > machine.gpu.per_node

    def over_replicas(num_bytes: float) -> float:
        rest = machine.collective(num_bytes * (trained - of_experts), ranks, across_nodes=across)
        return rest + machine.collective(num_bytes * of_experts, layout.expert_dp, across_nodes=across)

    reduce, gather = over_replicas(4), over_replicas(2)
    if layout.fsdp != "none":
        reduce, gather = _sharded_messages(layout, parameters, machine)
    if not layout.distributed_optimizer:
        reduce, gather = 2 * reduce, 0.0
    hidden_reduce = fit.exposed if layout.overlap_grad_reduce or layout.fsdp != "none" else 1.0
    # With --fsdp, weights that stay whole are gathered after the update.
    beside_passes = layout.overlap_param_gather and layout.fsdp in ("none", "optim_grads_params")
    hidden_gather = fit.exposed if beside_passes else 1.0
    if layout.fsdp == "optim_grads_params":
        hidden_reduce = hidden_gather = fit.fsdp_exposed
    exposed = reduce * hidden_reduce + gather * hidden_gather
    exposed += _tower_sum(model, layout, machine)
    if layout.fsdp == "optim_grads_params":
        exposed = max(exposed, reduce + gather - passes)
    local = owned(layout, parameters)
    # Read and written: master weight and moments; read: gradients, also for their norm; written: weights, zeros.
    update = machine.moved(local * (2 * layout.state_bytes + 4 + 2) + trained * 8)
    if layout.offloaded_bytes:
        update += local * 6 / 25e9 + local * 16 / 100e9  # over PCIe, and in the host's memory
    if layout.muon_steps:
        update += max(_orthogonalization(model, layout, stage, machine) for stage in range(layout.pp))
    return exposed, update + fit.host_step


def _orthogonalization(model: Model, layout: RunLayout, stage: int, machine: Machine) -> float:
    """Return the seconds of Muon's Newton-Schulz iterations on the matrices of a stage. With the distributed optimizer
    all ranks of the stage share them; else those that divide the matrices do."""
    d, e, t, layers = model.decoder, model.decoder.experts, model.tower, layout.layers[stage]
    # Rows, columns and number of the matrices, after fused ones are split.
    matrices: list[tuple[float, float, float]] = []
    if layout.trains_language:
        mlps, attention = layers * (1 - d.sparse_share), layers * (1 - d.delta_share)
        matrices += [(d.hidden, d.queries, 2 * attention), (d.hidden, d.groups * d.head_dim, 2 * attention)]
        matrices += [(d.hidden, width, layers * d.delta_share) for width in (d.delta_in, d.delta_out)]
        matrices += [(d.hidden, d.ffn, 3 * mlps)]
        if e is not None:
            sparse = 3 * layers * d.sparse_share
            matrices += [(d.hidden, e.ffn, sparse * e.count), (d.hidden, e.shared, sparse)]
    if stage == 0 and layout.trains_tower:
        matrices += [(t.hidden, t.hidden, 4 * t.num_layers), (t.hidden, t.ffn, (3 if t.gated else 2) * t.num_layers)]
    seconds = sum(count * _newton_schulz(rows, columns, machine) for rows, columns, count in matrices)
    return layout.muon_steps * seconds / (layout.world / layout.pp if layout.distributed_optimizer else layout.tp)


def _newton_schulz(rows: float, columns: float, machine: Machine) -> float:
    """Return the seconds of an iteration on a matrix: A = X Xᵀ, A A, and their sum times X."""
    short, long = sorted((rows, columns))
    # Of a large symmetric product a quarter is not computed (training.optimization.newton_schulz).
    symmetric = 0.75 if short >= 4096 else 1.0
    products = machine.product(short, long, short) + machine.product(short, short, short)
    return symmetric * products + machine.product(short, short, long)


def _tower_sum(model: Model, layout: RunLayout, machine: Machine) -> float:
    """Return the seconds in which tensor-parallel ranks add up the gradients of whole towers, once in a step."""
    if not (layout.whole_towers and layout.trains_tower):
        return 0.0
    owned = model.tower.parameters / (layout.shards if layout.distributed_optimizer else 1)
    return 2 * machine.collective(4 * owned, layout.tp, across_nodes=layout.tp > machine.gpu.per_node)


def _sharded_messages(layout: RunLayout, p: StageParameters, machine: Machine) -> tuple[float, float]:
    """Return the seconds of summing gradients and of gathering weights in a step with --fsdp."""
    across = layout.world // layout.replicas > machine.gpu.per_node
    count = layout.num_micro_batches
    weights, gradients = layout.weight_bytes * p.trained, 4.0 * p.trained

    def over_shards(num_bytes: float) -> float:
        return machine.collective(num_bytes, layout.shards, across_nodes=across)

    reduce, gather = over_shards(gradients), over_shards(weights)
    if layout.fsdp in ("optim_grads", "optim_grads_params"):  # after every micro-batch: no rank has the whole sum
        reduce *= count
    if layout.fsdp == "optim_grads_params":  # before both passes of every micro-batch, frozen parameters too
        gather = 2 * count * over_shards(layout.weight_bytes * (p.total - p.ends))
        gather += over_shards(layout.weight_bytes * p.ends)
    if layout.replicas > 1:  # a sum of shards, which all replicas get
        wide = layout.world > machine.gpu.per_node
        shard_bytes = gradients if layout.fsdp == "optim" else gradients / layout.shards
        reduce += 2 * machine.collective(shard_bytes, layout.replicas, across_nodes=wide)
    return reduce, gather
