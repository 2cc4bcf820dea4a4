"""Files of a run or a checkpoint that hold something else than they must: one message that names the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.helpers.rough import TRAIN, Outcome, Sandbox, Trial

ROW = "Ends: contents"
RESUME = TRAIN.replace("iters 4", "iters 6") + " --name run --save-interval 2 --save-optim --load-optim"
TRACKER = "latest_checkpointed_iteration.txt"
OTHERS = {
    "not-utf8": b"\xff\xfe\x00",
    "empty": b"",
    "list": b"[1, 2]",
    "half": b'{"iteration": 1, "files"',
    "nested": b"[" * 200_000,
}
"""What a file may hold that is no JSON object."""


def put(folder: str, name: str, content: bytes) -> Callable[[Sandbox], None]:
    """Return what writes a file in the trial's own copy of a shared folder; `out` holds a finished run then."""

    def arrange(sandbox: Sandbox) -> None:
        root = sandbox.resumable() if folder == "out" else sandbox.own(folder)
        (root / name).write_bytes(content)

    return arrange


def _imported(name: str, content: bytes, command: str, *, code: int = 2, says: str = TRACKER) -> Trial:
    arrange = put("megatron", TRACKER, content)
    return Trial(
        f"contents/tracker-{name}", ROW, command, code=code, says=(says,), arrange=arrange, quick=name == "not-utf8"
    )


def _cut(sandbox: Sandbox) -> None:
    file = sandbox.resumable() / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-40])


def _grown(sandbox: Sandbox, outcome: Outcome) -> str | None:
    text = (sandbox.root / "out" / "run" / "metrics.jsonl").read_text()
    return None if '"iteration": 6' in text else "it has not trained on"


INSPECT = "llava-mcore inspect {megatron}"
TRIALS = [
    _imported("not-utf8", b"\xff\xfe", INSPECT),
    _imported("empty", b"", INSPECT),
    _imported("negative", b"-4\n", INSPECT),
    _imported("huge", b"9" * 5000, INSPECT),
    _imported("arabic-digits", "٣".encode(), INSPECT),
    _imported("export", b"\xff\xfe", "llava-mcore export-hf --megatron-dir {megatron} --hf-dir {out}/hf"),
    # A folder with checkpoints and a tracker that says nothing: the newest is used, and why is said.
    _imported("train", b"\xff\xfe", TRAIN, code=0),
    Trial("contents/metrics-cut", ROW, RESUME, code=0, arrange=_cut, check=_grown),
    Trial(
        "contents/wandb-id",
        ROW,
        RESUME,
        arrange=put("out", "wandb_run_id.txt", b"\xff"),
        says=("wandb_run_id",),
    ),
    Trial(
        "contents/load-optim-run-yaml",
        ROW,
        RESUME,
        arrange=put("out", "iter_0000004/run.yaml", b"\xff"),
        code=0,
        says=("run.yaml has 1 bytes",),
        check=_grown,
    ),
    *(
        Trial(
            f"contents/metrics-{name}",
            ROW,
            RESUME,
            says=("metrics.jsonl, line 1",),
            arrange=put("out", "metrics.jsonl", content + b"\n"),
        )
        for name, content in OTHERS.items()
        if name not in ("not-utf8",)
    ),
    *(
        # run.json says what a checkpoint holds: one that cannot be read makes it incomplete, the one before is used
        Trial(
            f"contents/run-json-{name}",
            ROW,
            RESUME,
            code=0,
            arrange=put("out", "iter_0000004/run.json", content),
            check=_grown,
        )
        for name, content in OTHERS.items()
    ),
    *(
        Trial(
            f"contents/config-json-{name}",
            ROW,
            "llava-mcore import-hf --hf-dir {hf} --megatron-dir {out}/m",
            says=("config.json",),
            arrange=put("hf", "config.json", content),
        )
        for name, content in OTHERS.items()
    ),
    *(
        Trial(
            f"contents/tensors-json-{name}",
            ROW,
            "llava-mcore export-hf --megatron-dir {megatron} --hf-dir {out}/hf",
            says=("tensors.json",),
            arrange=put("megatron", "iter_0000000/hf/tensors.json", content),
        )
        for name, content in OTHERS.items()
    ),
    *(
        Trial(
            f"contents/manifest-{name}",
            ROW,
            "llava-mcore check --megatron-dir {megatron}",
            says=("import_manifest.json",),
            arrange=put("megatron", "iter_0000000/hf/import_manifest.json", content),
        )
        for name, content in OTHERS.items()
    ),
    *(
        Trial(
            f"contents/tokenizer-{name}",
            ROW,
            TRAIN,
            says=("tokenizer",),
            arrange=put("hf", "tokenizer_config.json", content),
        )
        for name, content in OTHERS.items()
    ),
    *(
        Trial(
            f"contents/index-{name}",
            ROW,
            TRAIN,
            says=(".info.json",),
            arrange=put("data", ".nv-meta/.info.json", content),
        )
        for name, content in OTHERS.items()
    ),
    *(
        Trial(
            f"contents/config-{name}",
            ROW,
            "llava-mcore show-config --config {root}/c.yaml",
            says=("c.yaml",),
            arrange=lambda sandbox, content=content: Path(sandbox.root, "c.yaml").write_bytes(content),
            quick=name == "list",
        )
        for name, content in OTHERS.items()
        if name not in ("empty", "half")
    ),
    Trial(
        "contents/hf-is-a-socket",
        ROW,
        "llava-mcore inspect {root}/pipe",
        says=("pipe",),
        arrange=lambda sandbox: os.mkfifo(sandbox.root / "pipe"),
    ),
]
