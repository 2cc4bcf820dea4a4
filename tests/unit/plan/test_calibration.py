"""Measured rates: their file, what they change, and the measuring functions on a CPU, where the numbers say nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llava_mcore.cli import plan
from llava_mcore.errors import ConfigError
from llava_mcore.plan.hardware.calibration import (
    REFERENCE_ATTENTION,
    REFERENCE_FP8,
    REFERENCE_PRODUCTS,
    Calibration,
)
from llava_mcore.plan.hardware.calibration import read_calibration as read
from llava_mcore.plan.hardware.calibration import write_calibration as write
from llava_mcore.plan.hardware.efficiency import Efficiency
from llava_mcore.plan.hardware.gpus import GPUS
from llava_mcore.training import measure_gpu
from tests.unit.plan.test_command import LLAVA_7B, PACKS

REFERENCE = Calibration("NVIDIA H200", REFERENCE_PRODUCTS, REFERENCE_ATTENTION, memory=0.9, products_fp8=REFERENCE_FP8)
HALF = Calibration("NVIDIA H200", REFERENCE_PRODUCTS / 2, REFERENCE_ATTENTION / 2, memory=0.45)


def test_the_reference_changes_nothing_and_slower_parts_count(tmp_path: Path) -> None:
    fit = Efficiency()
    assert REFERENCE.applied(fit) == fit
    slow = replace(HALF, products_fp8=REFERENCE_FP8 / 4, link=0.1, num_gpus=8).applied(fit)
    assert slow.products == pytest.approx(fit.products / 2)
    assert slow.products_fp8 == pytest.approx(fit.products_fp8 / 4)
    assert slow.attention == pytest.approx(fit.attention / 2)
    assert (slow.memory, slow.link) == (0.45, 0.1)
    write(REFERENCE, tmp_path / "gpu.json")
    assert read(tmp_path / "gpu.json", GPUS["h200"]) == REFERENCE


def test_a_plan_with_a_file_is_slower_on_a_slow_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAVA_7B), encoding="utf-8")
    write(HALF, tmp_path / "gpu.json")
    arguments = ["--hf-dir", str(tmp_path), "--gpus", "2", *PACKS, "--dist-optim", "--as-given", "--json"]
    seconds = []
    for more in ([], ["--calibration", str(tmp_path / "gpu.json")]):
        assert plan.main([*arguments, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        seconds.append(found["fitting"][0]["seconds"]["step"])
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.1)
    assert "measured here: products 36% of the peak" in found["assumptions"][2]


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"

    def fails(text: str | None, match: str, gpu: str = "h200") -> None:
        if text is not None:
            file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=match):
            read(file, GPUS[gpu])

    fails(None, "No such file")
    fails("{", "not a file of --calibrate")
    fails('{"device": "NVIDIA H200"}', "not a file of --calibrate")
    write(REFERENCE, file)
    fails(None, r"measured on NVIDIA H200 \(h200\), but --gpu is h100", gpu="h100")
    values = json.loads(file.read_text(encoding="utf-8"))
    fails(json.dumps({**values, "device": "Other"}), "not in the table")
    fails(json.dumps({**values, "products": 7.5}), r"products = 7\.5: expected fractions")
    with pytest.raises(ConfigError, match="--calibrate"):
        write(REFERENCE, tmp_path / "no" / "gpu.json")
    if not torch.cuda.is_available():
        assert plan.main(["--calibrate", str(file)]) == 2
        assert "none was found" in capsys.readouterr().err


def test_rates_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert measure_gpu.product_rate(cpu, side=64, repeats=2) > 0
    assert measure_gpu.attention_rate(cpu, tokens=32, heads=2, repeats=2) > 0
    assert measure_gpu.copy_rate(cpu, num_bytes=1 << 16, repeats=2) > 0
    if not torch.cuda.is_available():
        assert measure_gpu.link_rate(2, num_bytes=1 << 16) > 0
