"""Qwen2-Audio is trained on packed clips by the real loader, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.bad_data_makers import index, messages, write_tar
from tests.helpers.tiny_audio import encoded, make_hf_audio
from tests.helpers.world import run_world
from tests.parallel import audio_checks

ANSWERS = ("seven", "It is a house.", "no.", "The lazy dog; 漢字とかな。")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root: Path = tmp_path_factory.mktemp("speech")
    model = make_hf_audio(root / "hf", seconds=4)
    import_hf(root / "hf", root / "megatron")
    samples: dict[str, Any] = {}
    for i in range(24):
        clips = {f"{n}.wav": encoded(0.3 + (5 * i + n) % 7 / 3, i) for n in range(i % 3)}
        asked = ("user", "<audio>\n" * len(clips) + "Which digit is shown?")
        samples[f"{i:03d}"] = {"json": messages(asked, ("assistant", ANSWERS[i % 4])), **clips}
    write_tar(root / "data" / "000000.tar", samples)
    index(root / "data")
    given = {"checkpoint": str(root / "megatron"), "hf": str(root / "hf"), "data": str(root / "data")}
    return given | {"positions": model.model.audio_tower.embed_positions.weight.double().sum().item(), "root": root}


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_training_is_resumed_bit_for_bit(material: dict[str, Any], tp: int, pp: int) -> None:
    given = {key: material[key] for key in ("checkpoint", "hf", "data")} | {
        "save_dir": str(material["root"] / f"runs{tp}{pp}")
    }
    ranks = run_world(tp * pp, audio_checks.save_and_resume, tp=tp, pp=pp, **given)
    for rank in ranks:
        uninterrupted, resumed = rank["curves"]
        assert uninterrupted == resumed and rank["same"]
        assert uninterrupted[-2] < uninterrupted[0]
    positions, *biases = ranks[0]["constants"]
    assert positions == material["positions"] and biases and not any(biases), "sinusoids and keys' biases stay"
