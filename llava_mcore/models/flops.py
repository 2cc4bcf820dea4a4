"""Model FLOPs of one training step, and model FLOPs utilization (MFU). The formula: benchmarks/formulas.md.

Counted are the matrix products that the model's definition needs, 2 * m * n * k each, on real tokens: pads,
recomputation and parts of a kernel that a causal mask discards are not counted, nor is anything that is not a matrix
product. Plain numbers from Hugging Face's config: no tensors, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from transformers import PretrainedConfig

from llava_mcore.media.batch_fields import MediaWork
from llava_mcore.models.architectures.registry import architecture_of, tower_config
from llava_mcore.models.language.families.registry import language_family
from llava_mcore.models.vision.families.registry import vision_family

_TERA = 1e12

# Dense peak in TFLOP/s by device name, BF16 and FP8, from NVIDIA's data sheets (figures with sparsity halved). Other
# boards with the same chip have other clocks, so an unknown name has no peak.
_PEAKS: dict[str, tuple[float, float | None]] = {
    "NVIDIA A100-SXM4-40GB": (312, None),
    "NVIDIA A100-SXM4-80GB": (312, None),
    "NVIDIA A100-PCIE-40GB": (312, None),
    "NVIDIA A100 80GB PCIe": (312, None),
    "NVIDIA H100 80GB HBM3": (989, 1979),
    "NVIDIA H100 PCIe": (756, 1513),
    "NVIDIA H100 NVL": (835, 1671),
    "NVIDIA H200": (989, 1979),
    "NVIDIA H200 NVL": (835, 1671),
    "NVIDIA B200": (2250, 4500),
    "NVIDIA GB200": (2500, 5000),
}


@dataclass(frozen=True)
class Workload:
    """The work of a step, over all micro-batches and ranks.

    `num_tokens` counts real tokens, image tokens included; `num_pairs` the (query, key) pairs of causal attention:
    n * (n + 1) / 2 for a sample of n tokens, packed or not; `media` is what the tower computes on; `num_trained` counts
    the tokens whose loss counts, which alone need the output layer (None: all).
    """

    num_tokens: int
    num_pairs: int
    media: MediaWork = field(default_factory=MediaWork)
    num_trained: int | None = None

    @property
    def num_predicted(self) -> int:
        """Tokens that pass through the output layer."""
        return self.num_tokens if self.num_trained is None else self.num_trained

    @classmethod
    def of_samples(cls, lengths: Sequence[int], num_tiles: int) -> Workload:
        """Build from the length of every sample, in tokens without padding."""
        return cls(sum(lengths), sum(n * (n + 1) // 2 for n in lengths), MediaWork(num_tiles))


@dataclass(frozen=True)
class TrainedParts:
    """The parts whose weights get a gradient, and the number of weights of the adapters in each part."""

    language_model: bool = True
    vision_model: bool = False
    vision_projection: bool = True
    language_adapter: int = 0
    vision_adapter: int = 0
    projection_adapter: int = 0


@dataclass(frozen=True)
class Flops:
    """Forward and backward FLOPs of one part."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one step by part. The tower's layers after the last feature layer do not run and do not count."""

    patch_embedding: Flops
    vision_layers: Flops
    vision_attention: Flops
    projection: Flops
    language_layers: Flops
    language_attention: Flops
    head: Flops
    adapters: Flops

    @property
    def total(self) -> int:
        return sum(part.total for part in self.parts().values())

    def parts(self) -> dict[str, Flops]:
        """Return the parts by name, in the order of the forward pass."""
        return {x.name: getattr(self, x.name) for x in fields(self)}


def model_flops(hf: PretrainedConfig, workload: Workload, trained: TrainedParts) -> ModelFlops:
    """Return the FLOPs of one step.

    A matrix product whose weight is trained costs as much again for the weight's gradient; one through which
    gradients flow to something trained below costs as much again for its input's. A product of two activations
    (attention) costs twice its forward where gradients flow, frozen weights or not.
    """
    text = hf.text_config
    into_projection = trained.vision_model or trained.vision_adapter > 0  # gradients that must go below a part
    into_language = into_projection or trained.vision_projection or trained.projection_adapter > 0
    vision = _vision(hf, workload.media, weight=trained.vision_model, flows=into_projection)
    products = [
        _linear(product, weight=trained.vision_projection, inputs=into_language if i else into_projection)
        for i, product in enumerate(architecture_of(hf).connector_products(hf, workload.media))
    ]
    scores = _attention(architecture_of(hf).connector_attention(hf, workload.media), flows=into_language)
    language = trained.language_model
    flows = language or trained.language_adapter > 0 or into_language
    family = language_family(text)
    layers = 2 * workload.num_tokens * family.layer_weights(text)
    attention = family.attention_products(text, num_tokens=workload.num_tokens, num_pairs=workload.num_pairs)
    return ModelFlops(
        **vision,
        projection=_sum([*products, scores]),
        language_layers=_linear(layers, weight=language, inputs=flows),
        language_attention=_attention(attention, flows=flows),
        head=_linear(2 * workload.num_predicted * text.hidden_size * text.vocab_size, weight=language, inputs=flows),
        adapters=_linear(_adapter_products(hf, workload, trained), weight=True, inputs=True),
    )


def _adapter_products(hf: PretrainedConfig, workload: Workload, trained: TrainedParts) -> int:
    """Return the forward FLOPs of the adapters' products: each of their weights meets every token of its part."""
    architecture = architecture_of(hf)
    num_layers = architecture.features(hf).num_layers
    tower = vision_family(tower_config(hf)).work(tower_config(hf), workload.media, num_layers)
    pairs = (
        (workload.num_tokens, trained.language_adapter),
        (tower.num_positions, trained.vision_adapter),
        (architecture.connector_rows(hf, workload.media), trained.projection_adapter),
    )
    return sum(2 * tokens * weights for tokens, weights in pairs)


def _linear(forward: int, *, weight: bool, inputs: bool) -> Flops:
    return Flops(forward, forward * (weight + inputs))


def _sum(parts: Sequence[Flops]) -> Flops:
    return Flops(sum(x.forward for x in parts), sum(x.backward for x in parts))


def _attention(forward: int, *, flows: bool) -> Flops:
    return Flops(forward, 2 * forward * flows)


def _vision(hf: PretrainedConfig, media: MediaWork, *, weight: bool, flows: bool) -> dict[str, Flops]:
    """Return the tower's parts; pixels need no gradient."""
    vision, num_layers = tower_config(hf), architecture_of(hf).features(hf).num_layers
    family = vision_family(vision)
    fields, width = family.config_from_hf(vision, num_layers), family.hidden_size(vision)
    matrices = 3 if fields.get("gated_linear_unit") else 2
    weights = 4 * width**2 + matrices * width * family.ffn_size(vision)
    work = family.work(vision, media, num_layers)
    embedding = [
        _linear(product, weight=weight, inputs=weight and i > 0)
        for i, product in enumerate(family.embedding_products(vision, work.num_patches))
    ]
    return {
        "patch_embedding": Flops(sum(x.forward for x in embedding), sum(x.backward for x in embedding)),
        "vision_layers": _linear(2 * work.num_positions * num_layers * weights, weight=weight, inputs=flows),
        "vision_attention": _attention(4 * work.num_pairs * width, flows=flows),
    }


def peak_flops(device_name: str, *, fp8: bool = False) -> float | None:
    """Return the dense peak of a device in FLOP/s, or None if it is unknown.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it.
        fp8: the peak of FP8 instead of BF16 products.
    """
    peaks = _PEAKS.get(device_name, (None, None))
    peak = peaks[1] if fp8 else peaks[0]
    return None if peak is None else peak * _TERA


def mfu(flops: int, seconds: float, num_devices: int, peak: float) -> float:
    """Return model FLOPs utilization, 0 to 1.

    Args:
        flops: FLOPs of the step on all devices.
        seconds: wall time of the step, waiting for data included.
        num_devices: number of devices.
        peak: peak of one device in FLOP/s.
    """
    return flops / (seconds * num_devices * peak)
