"""The load of experts in the log, and the warning about those that starve."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llava_mcore.config.load import load_run_config
from llava_mcore.training.logs.expert_loads import StarvedExperts, load_sums
from llava_mcore.training.logs.expert_maps import EVERY, ExpertMaps, draw_loads
from llava_mcore.training.logs.sinks import Sinks


def test_busiest_and_idlest() -> None:
    sums = load_sums([[10, 10, 10, 10], [0, 0, 0, 0], [40, 0, 20, 20]])
    assert sums == {"max_expert_load": (pytest.approx(1 + 2), 2), "min_expert_load": (pytest.approx(1 + 0), 2)}
    assert load_sums([]) == {}


def test_a_starved_expert_is_named_once() -> None:
    starved = StarvedExperts()
    assert starved.check(1, [[0, 0], [900, 4]]) is None, "too few tokens to tell"
    warning = starved.check(2, [[0, 0], [1600, 5]])
    assert warning is not None and "1 experts" in warning and "layer 1 expert 1" in warning
    assert "iterations 1 to 2" in warning and "router.aux_loss_coef" in warning
    assert starved.check(3, [[0, 0], [2000, 5]]) is None, "it has been named"
    assert starved.check(4, [[0, 0], [1000, 1000]]) is None
    assert starved.check(5, [[0, 0], [2000, 5]]) is not None, "it had recovered"


def test_maps(tmp_path: Path) -> None:
    """Lines add up iterations, a resume drops later ones, and the image has a color for each load."""
    maps = ExpertMaps(tmp_path, keep_until=0)
    assert maps.draw() is None and not maps.add(1, [])
    loads = [[10.0, 30.0, 0.0, 0.0], [0.0] * 4, [5.0] * 4]
    assert [maps.add(iteration, loads) for iteration in (EVERY - 1, EVERY)] == [False, True]
    drawn = maps.draw()
    assert drawn == (tmp_path / "expert_loads.png", EVERY) and maps.draw() is None
    maps.add(EVERY + 1, loads)
    maps.draw()
    lines = [json.loads(line) for line in (tmp_path / "expert_loads.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "iteration": EVERY,
        "first_iteration": EVERY - 1,
        "tokens": [[20, 60, 0, 0], [0, 0, 0, 0], [10, 10, 10, 10]],
    }
    assert [x["iteration"] for x in lines] == [EVERY, EVERY + 1]
    with Image.open(tmp_path / "expert_loads.png") as image:
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 24) or []}
    assert {(5, 48, 97), (246, 246, 246)} <= colors, "starved experts, and those with an even load"
    ExpertMaps(tmp_path, keep_until=EVERY)
    assert len((tmp_path / "expert_loads.jsonl").read_text().splitlines()) == 1


def test_a_map_in_tensorboard(tmp_path: Path) -> None:
    run = load_run_config(None, [f"checkpoint.save_dir={tmp_path}", "logging.tensorboard=true"])
    run.run_dir.mkdir()
    draw_loads([[10.0, 30.0]], tmp_path / "map.png", title="map")
    sinks = Sinks(run, iteration=0)
    sinks.image("expert_loads", tmp_path / "map.png", 3)
    sinks.close()
    events = EventAccumulator(str(run.run_dir / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    (event,) = events.Images("expert_loads")
    assert event.step == 3
    with Image.open(io.BytesIO(event.encoded_image_string)) as shown, Image.open(tmp_path / "map.png") as drawn:
        assert shown.size == drawn.size
