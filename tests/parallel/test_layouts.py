"""Every class and family pair at every layout: logits as Hugging Face's, and a bitwise way back to disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llava_mcore.checkpoint.layout import hf_folder, iteration_folder, write_tracker
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from tests.helpers.cases import CASES, Case, case_inputs, hf_logits, make_case
from tests.helpers.world import run_world
from tests.parallel import checks

LAYOUTS: list[Any] = [(1, 1), (2, 1), (1, 2), (2, 2), *(pytest.param(4, pp, marks=pytest.mark.long) for pp in (1, 2))]
OF_FOUR = ("clip-llama", "clip-qwen2", "siglip-mistral", "siglip-qwen3")
"""What four tensor-parallel ranks divide otherwise than two: padded and tied vocabularies, one or two heads of keys."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case as HF folder, Megatron checkpoint made for (1, 1), inputs and HF's logits."""
    root = tmp_path_factory.mktemp("families")
    made = {}
    for case in CASES:
        hf, megatron = root / case.name / "hf", root / case.name / "megatron"
        model = make_case(case, hf)
        import_hf(hf, megatron)
        inputs = case_inputs(case, model, hf)
        made[case.name] = {"hf": hf, "megatron": megatron, "inputs": inputs, "logits": hf_logits(model, inputs)}
    return made


def assert_same_folder(a: Path, b: Path) -> None:
    """Every tensor bitwise, every other file byte for byte."""
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    for path in sorted(a.iterdir()):
        if path.suffix != ".safetensors":
            assert path.read_bytes() == (b / path.name).read_bytes(), path.name
            continue
        x, y = load_file(path), load_file(b / path.name)
        assert x.keys() == y.keys()
        wrong = [k for k in x if x[k].dtype != y[k].dtype or not torch.equal(x[k], y[k])]
        assert not wrong


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_parity_and_round_trip(imported: dict[str, dict[str, Any]], tmp_path: Path, tp: int, pp: int) -> None:
    """Logits are Hugging Face's, and what a layout saves is exported as the very bytes that were imported."""
    cases, targets = [], {}
    imported = {x.name: imported[x.name] for x in CASES if runs_at(x, tp, pp)}
    for name, made in imported.items():
        root = tmp_path / name
        targets[name] = iteration_folder(root, 0)
        targets[name].mkdir(parents=True)
        cases.append({"megatron": str(made["megatron"]), "inputs": made["inputs"], "resharded": str(targets[name])})
    results = run_world(tp * pp, checks.parity_and_reshard, tp=tp, pp=pp, cases=cases)
    differences = {}
    for i, (name, made) in enumerate(imported.items()):
        outputs = [rank[i] for rank in results if rank[i] is not None]
        assert len(outputs) == tp
        differences[name] = max((x - made["logits"]).abs().max().item() for x in outputs)
    print(json.dumps(differences))
    assert max(differences.values()) <= 1e-5, differences
    for name, made in imported.items():
        # What this layout wrote goes back to the very bytes that were imported.
        source = hf_folder(iteration_folder(made["megatron"], 0))
        copy_hf(source, hf_folder(targets[name]))
        write_tracker(targets[name].parent, 0)
        export_hf(targets[name].parent, tmp_path / f"{name}-hf", tensor_parallel=tp, pipeline_parallel=pp)
        assert_same_folder(made["hf"], tmp_path / f"{name}-hf")


def test_logits_where_processes_divide_tokens(imported: dict[str, dict[str, Any]]) -> None:
    """Each class's and pair's are Hugging Face's at --cp 2, too; a decoder that attends to images has no --cp."""
    divided = {x.name: imported[x.name] for x in CASES if x.architecture != "mllama"}
    cases = [{"megatron": str(made["megatron"]), "inputs": made["inputs"]} for made in divided.values()]
    for outputs in run_world(2, checks.parity_and_reshard, tp=1, pp=1, cp=2, cases=cases):
        for (name, made), logits in zip(divided.items(), outputs, strict=True):
            assert (logits - made["logits"]).abs().max() <= 1e-5, name


def runs_at(case: Case, tp: int, pp: int) -> bool:
    """Say whether a layout is one of a case's."""
    return case.name in OF_FOUR if tp == 4 else case.layouts is None or (tp, pp) in case.layouts


def copy_hf(source: Path, target: Path) -> None:
    """Give a checkpoint that a test world wrote the files that training would have copied."""
    shutil.copytree(source, target)
