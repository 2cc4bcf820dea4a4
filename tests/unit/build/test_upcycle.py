"""build --upcycle: a dense language model gets experts and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llava_mcore.cli import build as build_command
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.errors import ConfigError
from tests.helpers.build_parts import VOCAB, load, save_text, tensors_of

pytest_plugins = ("tests.helpers.build_fixtures",)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@torch.inference_mode()
def test_logits_are_those_of_the_dense_model(build_tiny: Any, tmp_path: Path, tie: bool) -> None:
    source = save_text(tmp_path / "text", "qwen3", tie=tie)
    out = build_tiny(source, upcycle=(6, 3))
    dense, built = AutoModelForCausalLM.from_pretrained(source).eval(), load(out)
    ids = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    expected, logits = dense(input_ids=ids).logits, built(input_ids=ids).logits[..., :VOCAB]
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    text = built.config.text_config
    assert (text.model_type, text.num_experts, text.num_experts_per_tok) == ("qwen3_moe", 6, 3)
    assert text.norm_topk_prob and text.moe_intermediate_size == dense.config.intermediate_size
    # Experts are copies, a matrix each; routers are small, and differ from layer to layer.
    copies = tensors_of(out, "layers.1.mlp.experts.")
    assert len(copies) == 18
    for name in ("gate_proj", "up_proj", "down_proj"):
        original = dense.get_parameter(f"model.layers.1.mlp.{name}.weight")
        assert all(torch.equal(x, original) for key, x in copies.items() if f".{name}." in key)
    routers = list(tensors_of(out, "mlp.gate.weight").values())
    assert len(routers) == 2 and not torch.equal(*routers)
    assert all(0.01 < x.std() < 0.04 for x in routers)
    # The folder is one that Megatron takes.
    import_hf(out, tmp_path / "m", expert_parallel=2, verify=True)
    export_hf(tmp_path / "m", tmp_path / "exported", verify=True)


@pytest.mark.parametrize(
    ("kind", "experts", "said"),
    [
        ("qwen2", (4, 2), "is a qwen2; of the dense models, only qwen3 has a class with experts"),
        ("qwen3_moe", (4, 2), "is a qwen3_moe"),
        ("qwen3", (4, 1), "--upcycle 4,1: expected E,K with 2 <= K <= E"),
        ("qwen3", (4, 5), "--upcycle 4,5: expected E,K"),
    ],
)
def test_what_cannot_be_upcycled(
    build_tiny: Any, tiny_parts: Any, kind: str, experts: tuple[int, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        build_tiny(tiny_parts(kind), upcycle=experts)


def test_the_flag_takes_two_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_command.main(["--text-model", "x", "--save-dir", str(tmp_path / "out"), "--upcycle", "8"])
    assert "argument --upcycle: invalid" in capsys.readouterr().err
