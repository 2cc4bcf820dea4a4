"""The sizes of a model: parameters and FLOPs of its parts, from config.json alone (see `read_config`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from llava_mcore.config.rules.dims import ModelDims


@dataclass(frozen=True)
class ExpertShape:
    """Mixtures of experts in place of MLPs. `count`: experts of a layer; `chosen`: those of a token; `ffn`, `shared`:
    width inside one of them, and inside what all tokens share; `layers`: layers that have a mixture."""

    count: int
    chosen: int
    ffn: int
    layers: int
    shared: int = 0

    def router(self, hidden: int) -> int:
        """Weights that choose the experts, and the gate of what is shared."""
        return hidden * (self.count + (1 if self.shared else 0))


@dataclass(frozen=True)
class Decoder:
    """The language model.

    `delta_layers`: layers with a gated delta net in place of attention; `delta_in`, `delta_out`: width of the net's
    first matrix and of what its last one reads; `delta_state`: numbers of its state.
    """

    num_layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    num_norms: int = 2
    head_norms: bool = False
    output_gate: bool = False
    max_positions: int = 4096
    window: int | None = None
    delta_layers: int = 0
    delta_in: int = 0
    delta_out: int = 0
    delta_state: int = 0
    delta_small: int = 0
    """Parameters of a delta net beside its matrices."""
    delta_heads: tuple[int, int] = (0, 0)
    """Heads of keys and of values."""
    experts: ExpertShape | None = None
    expanded: int = 0
    """Layers that build --expand-layers has inserted."""
    cross_layers: int = 0
    """Layers that attend to images in place of tokens: with two gates and norms of heads."""
    more_rows: int = 0
    """Tokens that have an embedding and are not predicted."""

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Width of queries, keys, values and, if there is one, the output's gate."""
        return ((2 if self.output_gate else 1) * self.heads + 2 * self.groups) * self.head_dim

    @property
    def delta_share(self) -> float:
        """Fraction of the layers that have a delta net."""
        return self.delta_layers / self.num_layers

    @property
    def mixer_weights(self) -> float:
        """Weights in the matrices of attention or delta net, the mean over the layers."""
        attention = self.hidden * (self.qkv + self.queries)
        delta = self.hidden * (self.delta_in + self.delta_out)
        return attention + self.delta_share * (delta - attention)

    @property
    def sparse_share(self) -> float:
        """Fraction of the layers that have experts."""
        return 0.0 if self.experts is None else self.experts.layers / self.num_layers

    @property
    def mlp_weights(self) -> float:
        """Weights of MLPs, of what all tokens share beside experts and of routers, the mean over the layers."""
        dense = (1 - self.sparse_share) * 3 * self.hidden * self.ffn
        if self.experts is None:
            return dense
        return dense + self.sparse_share * (3 * self.hidden * self.experts.shared + self.experts.router(self.hidden))

    @property
    def expert_weights(self) -> float:
        """Weights of all experts, the mean over the layers."""
        if self.experts is None:
            return 0.0
        return self.sparse_share * self.experts.count * 3 * self.hidden * self.experts.ffn

    @property
    def recomputed_weights(self) -> float:
        """Weights that a token meets in MLPs and in its experts, which --recompute selective computes again."""
        dense = (1 - self.sparse_share) * 3 * self.hidden * self.ffn
        return dense + self.chosen_weights

    @property
    def chosen_weights(self) -> float:
        """Weights of the experts of a token, the mean over the layers."""
        if self.experts is None:
            return 0.0
        return self.sparse_share * self.experts.chosen * 3 * self.hidden * self.experts.ffn

    @property
    def layer_weights(self) -> float:
        """Weights in the matrices of a layer but those of experts, the mean over the layers."""
        return self.mixer_weights + self.mlp_weights

    @property
    def layer_parameters(self) -> float:
        """All parameters of a layer, the mean over the layers."""
        biases = (self.qkv if self.qkv_bias else 0) + (2 * self.head_dim if self.head_norms else 0)
        small = biases + self.delta_share * (self.delta_small - biases)
        small += self.cross_layers / self.num_layers * (2 + 2 * self.head_dim)
        return self.layer_weights + self.expert_weights + self.num_norms * self.hidden + small


@dataclass(frozen=True)
class Tower:
    """The vision tower, or the audio encoder.

    `num_layers`: those that run. `positions`: of a tile, class token and registers included; 0: packed patches of
    images of any size. `merged`: patches that become a token. `full_layers`: layers that see whole images; the
    others see windows of `window` x `window` pixels. `patch_values`: numbers of a patch. `embedding`: weights that each
    patch meets before the layers. `small`: other parameters outside the layers. `layer_small`: biases, norms and scales
    of a layer.
    """

    kind: str
    num_layers: int
    all_layers: int
    hidden: int
    ffn: int
    heads: int
    gated: bool
    patch: int
    positions: int
    patch_values: int
    embedding: int
    small: int
    layer_small: int
    image_side: int = 0
    merged: int = 1
    full_layers: int | None = None
    window: int = 0
    keeps_class_token: bool = False
    padded_ffn: int = 0

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Weights in the matrices of a layer."""
        return 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.padded_ffn

    @property
    def parameters(self) -> int:
        """All parameters that training builds."""
        return self.num_layers * (self.layer_weights + self.layer_small) + self.embedding + self.small


@dataclass(frozen=True)
class LinearShape:
    """A matrix that `rows` features of `per` meet: the tower's positions, or images."""

    inputs: int
    outputs: int
    share: float = 1.0
    """Rows per position of the tower that the connector reads, or per image."""
    per: Literal["position", "picture"] = "position"

    @property
    def weights(self) -> int:
        """Weights of the matrix."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ConnectorShape:
    """The connector, which maps the tower's features. `small`: parameters beside the products' matrices."""

    products: Sequence[LinearShape]
    small: int
    ffn: int
    latents: int = 0
    """Tokens of an image, if it is a perceiver."""
    repeated: int = 1
    """Equal connectors side by side, of inner layers (deepstack)."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.repeated * (sum(x.weights for x in self.products) + self.small)


@dataclass(frozen=True)
class TileRules:
    """How images become tiles (LLaVA-NeXT, OneVision, InternVL, Idefics3)."""

    pinpoints: tuple[tuple[int, int], ...] = ()
    """Heights and widths of the grids in pixels."""
    max_tiles: int | None = None
    newline: bool = False
    thumbnail: bool = False
    resized_to: int | None = None
    """Longest edge of an image before it is cut."""


@dataclass(frozen=True)
class Model:
    """A whole model. `pixels`: smallest and largest area of an image that keeps its size."""

    model_type: str
    decoder: Decoder
    tower: Tower
    connector: ConnectorShape
    tiles: TileRules = field(default_factory=TileRules)
    pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280)
    num_deepstack: int = 0

    @property
    def hears(self) -> bool:
        """Whether its samples have audio in place of images."""
        return self.model_type == "qwen2_audio"

    @property
    def language_parameters(self) -> float:
        """Parameters of the language model without padding of the vocabulary."""
        d = self.decoder
        ends = ((1 if d.tied else 2) * d.vocab + d.more_rows) * d.hidden + d.hidden
        return d.num_layers * d.layer_parameters + ends

    @property
    def parameters(self) -> float:
        """All parameters that training builds."""
        return self.language_parameters + self.tower.parameters + self.connector.parameters

    def dims(self) -> ModelDims:
        """Return what the rules of layouts read."""
        d, t = self.decoder, self.tower
        return ModelDims(
            num_layers=d.num_layers,
            hidden_size=d.hidden,
            ffn_hidden_size=d.ffn,
            num_attention_heads=d.heads,
            num_query_groups=d.groups,
            vocab_size=d.vocab,
            vision_num_layers=t.all_layers,
            vision_hidden_size=t.hidden,
            vision_ffn_hidden_size=t.padded_ffn,
            vision_num_attention_heads=t.heads,
            max_position_embeddings=d.max_positions,
            sliding_window=d.window,
            keeps_class_token=t.keeps_class_token,
            projection_ffn_hidden_size=self.connector.ffn,
            num_deepstack=self.num_deepstack,
            delta_key_heads=d.delta_heads[0],
            delta_value_heads=d.delta_heads[1],
            delta_width=d.delta_in,
            num_experts=0 if d.experts is None else d.experts.count,
            expert_ffn_hidden_size=0 if d.experts is None else d.experts.ffn,
            shared_ffn_hidden_size=0 if d.experts is None else d.experts.shared,
            num_cross_layers=d.cross_layers,
        )
