"""Files of strangers: they run nothing, are read from nowhere else, and come to an end."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.rough_rows.contents import RESUME
from tests.helpers.rough import TRAIN, Sandbox, Trial

IMPORT = "llava-mcore import-hf --hf-dir {hf} --megatron-dir {out}/m"
CHECK = "llava-mcore check --data-path {data} --tokenizer-load-dir {hf}"
PREPARE = "llava-mcore prepare {root}/rows.jsonl --out {out}/d --num-workers 1 --max-skip-rate 1"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)


class _Exploit:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self.proof),)


def _poisoned(folder: str) -> Callable[[Sandbox], None]:
    def arrange(sandbox: Sandbox) -> None:
        root = sandbox.resumable() if folder == "out" else sandbox.own(folder)
        for iteration in root.glob("iter_*"):
            (iteration / ".metadata").write_bytes(pickle.dumps(_Exploit(sandbox.root / "marker")))

    return arrange


def _weights_at(name: str) -> Callable[[Sandbox], None]:
    """Return what lets the index of weights name a file elsewhere."""

    def arrange(sandbox: Sandbox) -> None:
        from safetensors import safe_open

        folder = sandbox.own("hf")
        outside = sandbox.root / "outside"
        outside.mkdir()
        (folder / "model.safetensors").rename(outside / "w.safetensors")
        with safe_open(outside / "w.safetensors", framework="pt") as file:
            names = list(file.keys())
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, name.format(outside=outside))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return arrange


def _row(image: str, text: str = "It is seven.") -> str:
    turns = [{"from": "human", "value": "<image>\nWhich digit?"}, {"from": "gpt", "value": text}]
    return json.dumps({"image": image, "conversations": turns}) + "\n"


def _rows(*more: str, links: dict[str, str] | None = None) -> Callable[[Sandbox], None]:
    """Return what writes conversations, one good one and others, beside a pipe and links of these names."""

    def arrange(sandbox: Sandbox) -> None:
        from tests.helpers.shards import jpeg

        (sandbox.root / "good.jpg").write_bytes(jpeg(7))
        os.mkfifo(sandbox.root / "pipe.jpg")
        for name, target in (links or {}).items():
            (sandbox.root / name).symlink_to(target)
        (sandbox.root / "rows.jsonl").write_text(_row("good.jpg") + "".join(more))

    return arrange


def _file(name: str, text: str) -> Callable[[Sandbox], None]:
    return lambda sandbox: (sandbox.root / name).write_text(text)  # type: ignore[return-value]


def _long_answer(sandbox: Sandbox) -> None:
    from tests.helpers.shards import make_dataset

    make_dataset(sandbox.root / "data", replace={3: {"txt": "very " * 20_000_000}})


LOOP = "{% for i in range(99999999) %}{{ i }}{% endfor %}"
SUBMIT = TRAIN + " --submit --dry-run --sbatch-options "
TRIALS = [
    Trial("security/index-outside", "S1", IMPORT, arrange=_weights_at("../outside/w.safetensors"), says=("outside",)),
    Trial("security/index-absolute", "S1", IMPORT, arrange=_weights_at("{outside}/w.safetensors"), says=("outside",)),
    Trial("security/metadata-inspect", "S2", "llava-mcore inspect {megatron}", arrange=_poisoned("megatron")),
    Trial(
        "security/metadata-export",
        "S2",
        "llava-mcore export-hf --megatron-dir {megatron} --hf-dir {out}/hf",
        arrange=_poisoned("megatron"),
    ),
    Trial("security/metadata-train", "S2", TRAIN, arrange=_poisoned("megatron")),
    Trial("security/metadata-resume", "S2", RESUME, arrange=_poisoned("out")),
    Trial("security/sbatch-newline", "S3", SUBMIT + "$'--mem=1\\ntouch x'", says=("sbatch",)),
    Trial("security/sbatch-quote", "S3", SUBMIT + '\'--comment="a \\" b"\'', says=("#SBATCH",)),
    Trial("security/picture-is-a-pipe", "S4", PREPARE, code=0, arrange=_rows(_row("pipe.jpg"))),
    Trial(
        "security/picture-is-endless",
        "S4",
        PREPARE,
        code=0,
        arrange=_rows(_row("z.jpg"), links={"z.jpg": "/dev/zero"}),
    ),
    Trial("security/source-is-a-pipe", "S4", PREPARE.replace("rows.jsonl", "pipe.jpg"), arrange=_rows(), seconds=90),
    Trial("security/rows-nested", "S4", PREPARE, code=0, arrange=_rows("[" * 100_000 + "\n", '{"a":' * 100_000 + "\n")),
    Trial(
        "security/yaml-bomb",
        "S4",
        "llava-mcore show-config --config {root}/b.yaml",
        arrange=_file("b.yaml", BOMB),
        says=("b.yaml",),
        seconds=30,
    ),
    Trial(
        "security/yaml-bomb-prepare",
        "S4",
        PREPARE.replace("rows.jsonl", "b.yaml"),
        arrange=_file("b.yaml", BOMB),
        says=("b.yaml",),
    ),
    Trial(
        "security/yaml-bomb-blend",
        "S4",
        CHECK.replace("{data}", "{root}/b.yaml"),
        arrange=_file("b.yaml", BOMB),
        code=2,
        one_message=False,
    ),
    Trial(
        "security/endless-template",
        "S4",
        CHECK + " --chat-template {root}/t.jinja",
        arrange=_file("t.jinja", LOOP),
        one_message=False,
    ),
    Trial("security/answer-of-100-mb", "S4", CHECK + " --full", code=None, arrange=_long_answer, seconds=120),
]
