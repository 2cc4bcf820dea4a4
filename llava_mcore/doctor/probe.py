"""Imports modules one after another and prints a line for each that could be: `python -m llava_mcore.doctor.probe …`.

A module that cannot be imported ends the process, by an exception or a signal.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

MARK = "llava_mcore.doctor.probe: "


def main(modules: Sequence[str]) -> None:
    """Import every module; the line of torch has what it knows of the machine."""
    for module in modules:
        importlib.import_module(module)
        facts = _torch_facts() if module == "torch" else {}
        print(MARK + json.dumps({"module": module, **facts}), flush=True)


def _torch_facts() -> dict[str, Any]:
    """Return torch's CUDA, NCCL and cuDNN, every GPU that it sees, and its warning if it sees none."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.cuda.get_device_properties(i) for i in range(count)]
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    cudnn = torch.backends.cudnn.version()
    return {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "cudnn": None if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "gpus": [{"name": x.name, "memory": x.total_memory, "capability": f"{x.major}.{x.minor}"} for x in devices],
        "warning": str(caught[0].message).splitlines()[0] if caught else "",
    }


if __name__ == "__main__":
    main(sys.argv[1:])
