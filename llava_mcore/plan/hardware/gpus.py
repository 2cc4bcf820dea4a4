"""The GPUs that a plan may be made for: published figures.

Peaks are dense, from NVIDIA's data sheets (figures with sparsity halved). Memory is what `nvidia-smi` shows of one, in
GiB. NVLink is one direction (half of the data sheet's figure). `network` is one 400 Gb/s port (InfiniBand NDR) per GPU
of a node with NVLink, as in NVIDIA's DGX and HGX reference designs, 200 Gb/s for A100 (HDR).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from llava_mcore.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    `bf16`, `fp8`: dense peaks in FLOP/s; fp8 None: it has none. `bandwidth`: of its memory, bytes/s. `link`: bytes/s to
    the others of a node, one direction. `network`: bytes/s to other nodes.
    """

    name: str
    memory: float
    """GiB."""
    bf16: float
    fp8: float | None
    bandwidth: float
    link: float
    network: float = 50e9
    per_node: int = 8
    devices: tuple[str, ...] = ()
    """Names by torch.cuda.get_device_name."""

    @property
    def usable(self) -> float:
        """GiB that a plan may fill: 5 % stay free, since predictions are off by as much."""
        return 0.95 * self.memory


_PCIE4, _PCIE5 = 32e9, 64e9

GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA A100 Tensor Core GPU data sheet, 2021: 312 TFLOP/s, NVLink 600 GB/s.
        Gpu("a100-40", 39.4, 312e12, None, 1.555e12, 300e9, 25e9, devices=("NVIDIA A100-SXM4-40GB",)),
        Gpu("a100-80", 79.2, 312e12, None, 2.039e12, 300e9, 25e9, devices=("NVIDIA A100-SXM4-80GB",)),
        Gpu("a100-80-pcie", 79.2, 312e12, None, 1.935e12, _PCIE4, 25e9, devices=("NVIDIA A100 80GB PCIe",)),
        # NVIDIA H100 data sheet, 2023: 989 / 1,979 TFLOP/s, NVLink 900 GB/s; PCIe board 756 / 1,513; NVL 835 / 1,671.
        Gpu("h100", 79.2, 989e12, 1979e12, 3.35e12, 450e9, devices=("NVIDIA H100 80GB HBM3",)),
        Gpu("h100-pcie", 79.2, 756e12, 1513e12, 2.0e12, _PCIE5, devices=("NVIDIA H100 PCIe",)),
        Gpu("h100-nvl", 93.1, 835e12, 1671e12, 3.9e12, 300e9, devices=("NVIDIA H100 NVL",)),
        # NVIDIA H200 data sheet, 2024: as H100 with 141 GB at 4.8 TB/s.
        Gpu("h200", 139.8, 989e12, 1979e12, 4.8e12, 450e9, devices=("NVIDIA H200",)),
        Gpu("h200-nvl", 139.8, 835e12, 1671e12, 4.8e12, 450e9, devices=("NVIDIA H200 NVL",)),
        # NVIDIA DGX B200 data sheet, 2024, an eighth of it: 36 / 72 PFLOP/s with sparsity, 1,440 GB, 64 TB/s.
        Gpu("b200", 178.0, 2250e12, 4500e12, 8.0e12, 900e9, devices=("NVIDIA B200",)),
        Gpu("gb200", 184.0, 2500e12, 5000e12, 8.0e12, 900e9, per_node=4, devices=("NVIDIA GB200",)),
        # NVIDIA L40S data sheet, 2023: 362 / 733 TFLOP/s, 864 GB/s, no NVLink.
        Gpu("l40s", 44.4, 362e12, 733e12, 0.864e12, _PCIE4, 25e9, devices=("NVIDIA L40S",)),
        # NVIDIA Ada architecture white paper, 2022: 165 TFLOP/s with fp32 sums, 1,008 GB/s.
        Gpu("rtx4090", 23.5, 165e12, 330e12, 1.008e12, _PCIE4, 25e9, devices=("NVIDIA GeForce RTX 4090",)),
    )
}


def gpu_named(name: str) -> Gpu:
    """Return a kind of GPU by its name here or in torch. Raises ConfigError for one that is not known."""
    gpu = GPUS.get(name.lower()) or gpu_of_device(name)
    if gpu is None:
        close = difflib.get_close_matches(name.lower(), GPUS, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"--gpu {name}: no such GPU in the table{meant}; known: {', '.join(GPUS)}")
    return gpu


def gpu_of_device(device: str) -> Gpu | None:
    """Return the kind of GPU that torch names so; None for one that is not in the table."""
    return next((gpu for gpu in GPUS.values() if device in gpu.devices), None)
