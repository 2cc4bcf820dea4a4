"""The interface of flash-attn 2 over the FlashAttention-2 kernels in torch: the package has no wheel on PyPI.

`write_package` writes it as a package of that name, so that the products find it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_VERSION = "2.8.3"
_EXPORTS = "flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache"


def write_package(folder: Path) -> None:
    """Write flash_attn, and its metadata, into a folder for sys.path."""
    package = folder / "flash_attn"
    package.mkdir(parents=True)
    (package / "flash_attn_interface.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    first = f'__version__ = "{_VERSION}"\nfrom .flash_attn_interface import {_EXPORTS}\n'
    (package / "__init__.py").write_text(first, encoding="utf-8")
    padding = (
        "from einops import rearrange\nfrom .flash_attn_interface import index_first_axis, pad_input, unpad_input\n"
    )
    (package / "bert_padding.py").write_text(padding, encoding="utf-8")
    for name in ("ops", "layers"):
        (package / name).mkdir()
        (package / name / "__init__.py").touch()
    rotary = "from ..flash_attn_interface import apply_rotary_emb\n"
    (package / "layers" / "rotary.py").write_text(rotary, encoding="utf-8")
    cuda = "from flash_attn.flash_attn_interface import flash_attn_with_kvcache as varlen_bwd\n"
    (folder / "flash_attn_2_cuda.py").write_text(cuda, encoding="utf-8")
    info = folder / f"flash_attn-{_VERSION}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {_VERSION}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "top_level.txt").write_text("flash_attn\nflash_attn_2_cuda\n", encoding="utf-8")
    (info / "RECORD").write_text("flash_attn/__init__.py,,\nflash_attn_2_cuda.py,,\n", encoding="utf-8")


def _bound(size: int | None) -> int | None:
    return None if size is None or size < 0 else int(size)


def _forward(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Any, Any, int, int], given: dict[str, Any]) -> Tensor:
    """Run torch's kernel. `given`: arguments of flash-attn; one that torch's kernel does not have is refused."""
    window = given.pop("window_size", None) or (-1, -1)
    dropout, scale, causal = given.pop("dropout_p", 0.0), given.pop("softmax_scale", None), given.pop("causal", False)
    given.pop("deterministic", None)
    if any(x is not None and x is not False and x != 0.0 for x in given.values()):
        raise NotImplementedError(f"torch's FlashAttention has no {', '.join(given)}: install flash-attn")
    sizes = {"window_size_left": _bound(window[0]), "window_size_right": _bound(window[1])}
    result: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, *bounds, dropout, causal, False, scale=scale, **sizes
    )[0]
    return result


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **more: Any,
) -> Tensor:
    """Attention within sequences that follow each other."""
    given = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal, **more}
    return _forward(q, k, v, (cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k)), given)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **more: Any,
) -> Tensor:
    """Attention within the rows of a batch."""
    given = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal, **more}
    return _forward(q, k, v, (None, None, q.shape[1], k.shape[1]), given)


def _missing(*_: object, **__: object) -> Tensor:
    raise NotImplementedError("torch has no such kernel: install flash-attn")


flash_attn_with_kvcache = flash_attn_qkvpacked_func = flash_attn_varlen_qkvpacked_func = _missing
flash_attn_kvpacked_func = flash_attn_varlen_kvpacked_func = _missing
_flash_attn_forward = _flash_attn_backward = _flash_attn_varlen_forward = _flash_attn_varlen_backward = _missing


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the two halves of each head against each other."""
    if interleaved:
        raise NotImplementedError("rotation of neighbours: install flash-attn")
    cos, sin = (torch.cat((t, t), -1).unsqueeze(-2) for t in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), -1) * sin


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Select rows."""
    return x.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return the real tokens, their places, the bounds of the rows, the longest row and the lengths."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, bounds, int(lengths.max()), lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put real tokens back at their places."""
    out = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return out.index_copy(0, indices, hidden_states).view(batch, seqlen, *hidden_states.shape[1:])
