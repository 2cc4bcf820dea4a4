"""Which layers of a model become CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from llava_mcore.adapters.attach import adapters_of
from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.errors import ConfigError
from llava_mcore.models.language.decoder import LanguageModel
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.vision.patches import PatchTransformer
from llava_mcore.training.graphs.layer_graphs import LayerGraphs
from llava_mcore.training.graphs.packs import PatchPacks, TokenPacks
from llava_mcore.training.graphs.segments import factors_of, has_fixed_shapes, segment_of

LAYERS_PER_GRAPH = 4
"""Larger graphs copy and keep less between them; smaller ones let gradients be reduced earlier, which is of no use for
the small gradients of adapters: all their layers are one graph."""
TOWER_LAYERS_PER_GRAPH = 16
"""The same for a tower. Smaller graphs keep more results and gradients, for each size."""
SIZE_MULTIPLE = 256
"""Sizes of packs of patches are multiples of this."""


def model_graphs(model: VisionLanguageModel, chunk: DistributedDataParallel, run: RunConfig) -> list[LayerGraphs]:
    """Return the graphs that a run asks for.

    Args:
        model: the whole model, on one pipeline stage.
        chunk: its data-parallel wrapper.

    Raises:
        ConfigError: the model cannot have them.
    """
    below = (model.vision_model, model.vision_projection)
    flows_below = any(p.requires_grad for part in below for p in part.parameters())
    longest = run.data.seq_length
    graphs = [decoder_graphs(model.language_model, chunk, longest, model.num_deepstack, flows_below=flows_below)]
    if run.model.cuda_graphs_vision:
        graphs.append(tower_graphs(model.vision_model, chunk, run))
    return graphs


def most_patches(tower: PatchTransformer, data: DataConfig) -> int | None:
    """Return the largest number of patches of a pack; None if there is no limit."""
    limits = [] if data.max_media_tokens is None else [data.max_media_tokens]
    if tower.shape.merged > 1:  # so many patches for each token
        limits.append(data.seq_length * tower.shape.merged)
    return min(limits, default=None)


def decoder_graphs(
    model: LanguageModel, chunk: DistributedDataParallel, longest: int, num_deepstack: int, *, flows_below: bool
) -> LayerGraphs:
    """Return the graphs of a decoder's layers.

    Args:
        longest: largest length of a sample.
        num_deepstack: layers after which features are added.
        flows_below: something that the layers' input depends on is trained.

    Raises:
        ConfigError: the model cannot have them.
    """
    config, packs = model.config, TokenPacks(longest)
    segments = list(decoder_segments(model, num_deepstack))
    of_first = segment_of(segments[0], packs).parameters()
    has_gradient = flows_below or has_fixed_shapes(segments[0][0]) or any(p.requires_grad for p in of_first)
    reasons = {
        "captures attention and router in layers with experts, and those of the first train nothing here": (
            not has_gradient
        ),
        "needs Transformer Engine's layers, which this run does not have": config.transformer_impl == "local",
        "does not work with dropout, which config.json asks for": config.attention_dropout or config.hidden_dropout,
    }
    errors = [f"--cuda-graphs {reason}: omit the flag" for reason, holds in reasons.items() if holds]
    if errors:
        raise ConfigError("\n".join(errors))
    return LayerGraphs(segments, config, chunk, packs)


def tower_graphs(tower: nn.Module, chunk: DistributedDataParallel, run: RunConfig) -> LayerGraphs:
    """Return the graphs of a tower's layers, and let the tower fill up its patches from now on.

    Raises:
        ConfigError: the tower cannot have them.
    """
    flag = "--cuda-graphs-vision"
    if not isinstance(tower, PatchTransformer):
        raise ConfigError(f"{flag} captures towers for images of any size, such as Qwen-VL's: omit the flag")
    parameters = [*tower.decoder.parameters(), *factors_of(tower.decoder).parameters()]
    if not any(p.requires_grad for p in parameters):
        raise ConfigError(f"{flag} captures a trained tower: train it, adapt it, or omit the flag")
    limit = most_patches(tower, run.data)
    if limit is None:
        raise ConfigError(f"{flag} needs a largest number of patches: set data.max_media_tokens, or omit the flag")
    tower.sizes = sizes_up_to(run.training.micro_batch_size * limit)
    return LayerGraphs(tower_segments(tower), tower.config, chunk, PatchPacks(tower))


def decoder_segments(model: LanguageModel, num_deepstack: int = 0) -> Iterator[list[TransformerLayer]]:
    """Yield layers that become one graph: neighbors, all in FP8 or none, or one whose experts follow without a graph.
    Features are added between two graphs."""
    is_adapted = any(adapters_of(module) for module in model.decoder.modules())
    group_size = len(model.decoder.layers) if is_adapted else LAYERS_PER_GRAPH
    for _, group in groupby(
        model.decoder.layers,
        lambda layer: (
            min(layer.layer_number, num_deepstack + 1),
            is_first_last_bf16_layer(model.config, layer.layer_number - 1),
            0 if has_fixed_shapes(layer) else layer.layer_number,
        ),
    ):
        layers = list(group)
        for start in range(0, len(layers), group_size):
            yield layers[start : start + group_size]


def sizes_up_to(limit: int) -> tuple[int, ...]:
    """Return the sizes that packs of patches are filled up to: sixteenths of the largest, below its half quarters.

    On average a thirty-second of the largest is blank in packs that are more than half full, if the largest is 16 or
    more times `SIZE_MULTIPLE`.
    """
    sizes = {-(-limit * i // (16 * SIZE_MULTIPLE)) * SIZE_MULTIPLE for i in (4, *range(8, 17))}
    return tuple(sorted(sizes))


def tower_segments(tower: PatchTransformer) -> Iterator[list[TransformerLayer]]:
    """Yield layers that become one graph. Features are taken between two graphs."""
    layers: list[TransformerLayer] = []
    for layer in tower.decoder.layers:
        layers.append(layer)
        if layer.layer_number in tower.features.layers or len(layers) == TOWER_LAYERS_PER_GRAPH:
            yield layers
            layers = []
    if layers:
        yield layers
