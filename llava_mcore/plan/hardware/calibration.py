"""Measured rates of the GPUs at hand, in a small file, and what they change in a plan.

Training reaches less than a benchmark of one kernel. So rates of products and attention are compared with those that
the same kernels had on the H200 whose steps the constants were fitted to; a plan's efficiencies change by that ratio.
For memory and links, of which no such rates are known, a measured rate is a limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llava_mcore.errors import ConfigError
from llava_mcore.plan.hardware.efficiency import Efficiency
from llava_mcore.plan.hardware.gpus import Gpu, gpu_of_device

REFERENCE_PRODUCTS = 0.728
"""Fraction of the BF16 peak that `--calibrate` measured on an H200, where a step of LLaVA-1.5-7B took as long as an
uncalibrated plan says (benchmarks/results/train_step_7b_1_adamw.json)."""
REFERENCE_FP8 = 0.639
"""The same of FP8 products."""
REFERENCE_ATTENTION = 0.441
"""The same of attention."""
PLAUSIBLE = (0.01, 1.2)
"""Range of a fraction of a published peak; clocks above the published ones reach a little more than 1."""


@dataclass(frozen=True)
class Calibration:
    """Fractions of the published peaks that were measured. None: not measured.

    `device`: torch's name of the GPU. `num_gpus`: that exchanged messages, for `link`.
    """

    device: str
    products: float
    attention: float
    memory: float
    products_fp8: float | None = None
    link: float | None = None
    num_gpus: int = 1

    def applied(self, fit: Efficiency) -> Efficiency:
        """Return the efficiencies on this machine."""
        ratio = self.products / REFERENCE_PRODUCTS
        fp8 = ratio if self.products_fp8 is None else self.products_fp8 / REFERENCE_FP8
        return replace(
            fit,
            products=fit.products * ratio,
            products_fp8=fit.products_fp8 * fp8,
            attention=fit.attention * self.attention / REFERENCE_ATTENTION,
            memory=min(fit.memory, self.memory),
            link=fit.link if self.link is None else min(fit.link, self.link),
        )

    def describe(self) -> str:
        """Return the measured fractions in words."""
        parts = {"products": self.products, "FP8 products": self.products_fp8, "attention": self.attention}
        parts |= {"memory": self.memory, f"links of {self.num_gpus} GPUs": self.link}
        return ", ".join(f"{name} {value:.0%} of the peak" for name, value in parts.items() if value is not None)


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write the file. ConfigError if that is impossible."""
    try:
        path.write_text(json.dumps(asdict(calibration), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--calibrate {path}: {error.strerror}") from error


def read_calibration(path: Path, gpu: Gpu) -> Calibration:
    """Read a file for plans of a kind of GPU.

    Raises:
        ConfigError: it cannot be read, is of another kind of GPU, or has values that cannot be.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        calibration = Calibration(**values)
        wrong = _implausible(values)
    except OSError as error:
        raise ConfigError(f"--calibration {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--calibration {path}: not a file of --calibrate ({error})") from error
    if wrong:
        raise ConfigError(f"--calibration {path}: {', '.join(wrong)}: expected fractions of a peak: measure again")
    measured = gpu_of_device(calibration.device)
    if measured is None or measured.name != gpu.name:
        kind = "not in the table" if measured is None else measured.name
        raise ConfigError(
            f"--calibration {path} was measured on {calibration.device} ({kind}), but --gpu is {gpu.name}: give that "
            "kind, or omit the file"
        )
    return calibration


def _implausible(values: Mapping[str, Any]) -> list[str]:
    fractions = ("products", "products_fp8", "attention", "memory", "link")
    low, high = PLAUSIBLE
    return [
        f"{name} = {values[name]}"
        for name in fractions
        if values.get(name) is not None and not low <= values[name] <= high
    ]
