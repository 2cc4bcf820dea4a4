"""Images of several sizes, videos, audio and plain text are packed, train the same at every layout, and resume."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.models.architectures.registry import ARCHITECTURES
from tests.helpers.bad_data_makers import index, messages, write_tar
from tests.helpers.cases import CASES, EACH_CLASS, SHORT_AUDIO, make_case
from tests.helpers.shards import jpeg, make_dataset
from tests.helpers.tiny_audio import encoded
from tests.helpers.tiny_qwen import WITH_EXPERTS
from tests.helpers.world import run_world
from tests.parallel import any_size_checks

NUM_SAMPLES = 24
CONSTANT = {SHORT_AUDIO.name: {"0.vision_model.position_embeddings.weight"}}
"""What training leaves as it is: Whisper's positions are those of sines."""
SIZES = ((56, 56), (130, 60), (50, 140), (120, 115), (30, 31))
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
ELSEWHERE = (*WITH_EXPERTS, "mllama")
"""Experts need sequence parallelism to train at tp 2: test_experts. Mllama has one stage: test_mllama."""
OF_ANY_SIZE = [x for x in CASES if x.architecture not in ("llava", *ELSEWHERE)]
OF_ANY_SIZE = [SHORT_AUDIO if x.architecture == SHORT_AUDIO.architecture else x for x in OF_ANY_SIZE]
RESUMED = [x for x in EACH_CLASS if x.architecture not in ELSEWHERE]
FIRST_OF_CLASS = {x.architecture: x.name for x in reversed(OF_ANY_SIZE)}
"""Architecture -> its case that trains at (2, 1) or (1, 2), too, in turns; all cases train at (1, 1) and (2, 2)."""


def resized(index: int) -> bytes:
    """A digit of one of the sizes."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(jpeg(index))).resize(SIZES[index % len(SIZES)]).save(buffer, "PNG")
    return buffer.getvalue()


def filmed(index: int) -> dict[str, Any]:
    """The parts of a sample about a video of two to five frames."""
    names = [f"film.{number}.jpg" for number in range(2 + index % 4)]
    about = {"question": "Which digits are shown?", "videos": [{"frames": names, "fps": 2.0}]}
    return {"json": json.dumps(about).encode()} | {name: jpeg(index + i) for i, name in enumerate(names)}


def with_audio(number: int) -> dict[str, Any]:
    """The parts of a sample about no, one or two audio clips."""
    clips = {f"{n}.wav": encoded(0.3 + (5 * number + n) % 7 / 3, number) for n in range(number % 3)}
    asked = ("user", "<audio>\n" * len(clips) + "Which digit is said?")
    return {"json": messages(asked, ("assistant", "It is seven." if number % 2 else "no."))} | clips


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root: Path = tmp_path_factory.mktemp("any_size")
    cases = {}
    for case in {case.name: case for case in (*OF_ANY_SIZE, *RESUMED)}.values():
        make_case(case, root / case.name / "hf")
        import_hf(root / case.name / "hf", root / case.name / "megatron")
        kind = ARCHITECTURES[case.architecture]
        data = "sounds" if kind.takes_audios else "videos" if kind.takes_videos else "pictures"
        cases[case.name] = {
            "hf": str(root / case.name / "hf"),
            "checkpoint": str(root / case.name / "megatron"),
            "data": str(root / data),
        }
    replace: dict[int, dict[str, Any]] = {i: {"jpg": None, "png": resized(i)} for i in range(NUM_SAMPLES)}
    replace |= {i: {"jpg": None} for i in range(0, NUM_SAMPLES, 5)}
    make_dataset(root / "pictures", num_samples=NUM_SAMPLES, replace=replace, sample_type="CrudeWebdataset")
    # Some have a video beside their image, some a video alone.
    replace |= {i: replace[i] | filmed(i) for i in range(0, NUM_SAMPLES, 3)}
    make_dataset(root / "videos", num_samples=NUM_SAMPLES, replace=replace, sample_type="CrudeWebdataset")
    write_tar(root / "sounds" / "000000.tar", {f"{i:03d}": with_audio(i) for i in range(NUM_SAMPLES)})
    index(root / "sounds")
    return {"cases": cases, "save_dir": str(root / "runs")}


@pytest.mark.long
def test_every_layout_trains_alike(material: dict[str, Any]) -> None:
    curves = {}
    for tp, pp in LAYOUTS:
        names = [x.name for x in OF_ANY_SIZE] if tp == pp else list(FIRST_OF_CLASS.values())[tp - 1 :: 2]
        given = material | {"cases": {name: material["cases"][name] for name in names}}
        ranks = run_world(tp * pp, any_size_checks.train, tp=tp, pp=pp, **given)
        curves[tp, pp] = ranks[0]
        assert len(ranks[0]) == (2 if tp * pp == 1 else 1) * len(names)
    one = curves[1, 1]
    for run, expected in one.items():
        if not run.endswith(", packed"):  # packs may be equally full
            assert len(set(expected["tiles"])) > 1, "batches hold different numbers of tiles or patches"
        assert expected["loss"][-1] < expected["loss"][0]
    for layout in LAYOUTS[1:]:
        for run, here in curves[layout].items():
            assert here["tokens"] == one[run]["tokens"] and here["tiles"] == one[run]["tiles"]
            assert here["loss"] == pytest.approx(one[run]["loss"], rel=1e-5), (layout, run)
            assert here["grad_norm"] == pytest.approx(one[run]["grad_norm"], rel=1e-4), (layout, run)


@pytest.mark.long
@pytest.mark.parametrize(("tp", "pp", "dp", "half"), [(2, 1, 2, 0), (2, 2, 1, 1)])
def test_every_class_resumes_bit_for_bit(material: dict[str, Any], tp: int, pp: int, dp: int, half: int) -> None:
    """A run with a stop has the losses, gradient norms and weights of one without, with the distributed optimizer.

    Each half of the classes at one layout: other tests have each kind of parallelism by itself.
    """
    names = [case.name for case in RESUMED][half::2]
    given = material | {
        "cases": {name: material["cases"][name] for name in names},
        "save_dir": f"{material['save_dir']}-{tp}-{pp}-{dp}",
    }
    ranks = run_world(tp * pp * dp, any_size_checks.stop_and_resume, tp=tp, pp=pp, **given)
    for rank, results in enumerate(ranks):
        assert list(results) == names
        for name, run in results.items():
            assert run["found"] == run["expected"], (rank, name)
            assert not run["different"], (rank, name)
            after_updates = run["expected"]["loss"][1:]  # the first step's rate is 0, and a step may be a whole epoch
            assert len(set(after_updates)) == len(after_updates)
            assert set(run["unchanged"]) <= CONSTANT.get(name, set()), (rank, name)
