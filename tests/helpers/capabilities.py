"""README.md's table of architectures: from the registry, and from the lists of classes that tests run with.

python -m tests.helpers.capabilities
"""

from __future__ import annotations

from llava_mcore.models.architectures.base import Architecture, TileArchitecture
from llava_mcore.models.architectures.registry import ARCHITECTURES
from tests.helpers.cases import EACH_CLASS
from tests.helpers.tiny_classes import MAKERS
from tests.helpers.tiny_qwen import WITH_EXPERTS
from tests.parallel import test_any_size, test_generate

YES, UNTESTED, NO = "yes", "untested", "no"
LLAVA = "llava"
"""What most tests of a feature run with."""
PACKED = {LLAVA, *MAKERS, *(case.architecture for case in test_any_size.OF_ANY_SIZE), *WITH_EXPERTS, "mllama"}
"""tests/parallel: test_packing, test_classes, test_any_size, test_mllama; with experts unit/models/test_qwen.py."""
ADAPTED = {case.architecture for case in EACH_CLASS}
QUANTIZED = ADAPTED - set(WITH_EXPERTS)
"""tests/unit/adapters/test_adapter_classes.py."""
ANSWERED = {case.architecture for case in test_generate.CASES}
SERVED = {case.architecture for case in EACH_CLASS}
"""tests/unit/inference/test_serve.py: those that take images."""
ON_GPUS = {
    LLAVA: "trained, also in FP8",
    "llava_next": "forward only",
    "llava_onevision": "trained",
    "internvl": "forward only",
    "idefics2": "forward only",
    "idefics3": "forward only",
    "smolvlm": "forward only",
    "qwen2_vl": "forward only",
    "qwen2_5_vl": "trained, also in FP8",
    "qwen3_vl": "trained, 16 layers",
    "qwen3_vl_moe": "trained, also in FP8",
    "qwen3_5": "trained, 12 layers",
    "qwen2_audio": "trained, 8 layers",
}
"""What has run on an H200: tests/gpu and benchmarks.train_step."""
COLUMNS = (
    *("…ForConditionalGeneration", "images", "videos", "audio", "packing", "LoRA", "QLoRA"),
    *("`generate`", "`serve`", "on an H200"),
)


def capability_table() -> str:
    """Return the table, in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(row(name, kind))} |" for name, kind in ARCHITECTURES.items()]
    return "\n".join(lines)


def row(name: str, kind: Architecture) -> list[str]:
    """Return the cells of an architecture."""
    tested = [YES if name in having else UNTESTED for having in (PACKED, ADAPTED, QUANTIZED, ANSWERED)]
    if name in WITH_EXPERTS:  # a rule refuses QLoRA: experts would stay as they are
        tested[2] = NO
    served = NO if not kind.takes_images else YES if name in SERVED else UNTESTED
    return [
        kind.model_class.__name__.removesuffix("ForConditionalGeneration"),
        pictures(name, kind),
        YES if kind.takes_videos else NO,
        "clips" if kind.takes_audios else NO,
        *tested,
        served,
        ON_GPUS.get(name, "not run"),
    ]


def pictures(name: str, kind: Architecture) -> str:
    """Return which sizes of images a class takes."""
    if not kind.takes_images:
        return NO
    if name == LLAVA:
        return "one size"
    return "any size, tiles" if isinstance(kind, TileArchitecture) else "any size"


if __name__ == "__main__":
    print(capability_table())
