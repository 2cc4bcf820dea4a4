"""Wrong numbers: what must be refused, or said, before it is trained on."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from tests.e2e.rough_rows.contents import RESUME
from tests.helpers.rough import TRAIN, Sandbox, Trial

SHOW = "llava-mcore show-config"
TRY = TRAIN + " --dry-run"
CHECK = "llava-mcore check --data-path {data} --tokenizer-load-dir {hf} --full"
IMPORT = "llava-mcore import-hf --hf-dir {hf} --megatron-dir {out}/m"
EXPORT = "llava-mcore export-hf --megatron-dir {megatron} --hf-dir {out}/hf"
DIGITS = "9" * 26


def flip(file: Path) -> None:
    """Flip 64 bytes in the middle of a file, which keeps its size."""
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
    file.write_bytes(data)


def _flipped_run(sandbox: Sandbox) -> None:
    for folder in sandbox.resumable().glob("iter_*"):
        flip(folder / "__0_0.distcp")


def _flipped_import(sandbox: Sandbox) -> None:
    (file,) = (sandbox.own("megatron") / "iter_0000000").glob("*_0.distcp")
    flip(file)


def _nan(sandbox: Sandbox) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    file = sandbox.own("hf") / "model.safetensors"
    tensors = load_file(file)
    tensors[_NORM].view(-1)[3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})


_NORM = "language_model.model.norm.weight"


def _linked(kind: bytes, target: str) -> object:
    """Return what makes one image of a shard a link."""

    def arrange(sandbox: Sandbox) -> None:
        from tests.helpers.shards import jpeg, prepare

        folder = sandbox.root / "data"
        folder.mkdir()
        with tarfile.open(folder / "000000.tar", "w") as tar:
            for number in range(8):
                parts = {"jpg": jpeg(0), "txt": b"It is zero.", "json": b'{"question": "Which?"}'}
                for ending, data in parts.items():
                    info = tarfile.TarInfo(f"s{number}.{ending}")
                    info.size = len(data)
                    if number == 3 and ending == "jpg":
                        info.type, info.linkname, info.size = kind, target, 0
                    tar.addfile(info, io.BytesIO(data))
        prepare(folder)

    return arrange


def _without_effect(flags: str, needs: str) -> Trial:
    return Trial(f"numbers/{flags.split()[0].lstrip('-')}-alone", "N6", f"{TRY} {flags}", says=(needs,))


TRIALS = [
    Trial("numbers/flipped-run", "N2", RESUME, says=("iter_0000004",), arrange=_flipped_run),
    Trial("numbers/flipped-import", "N2", TRAIN, says=("iter_0000000",), arrange=_flipped_import),
    Trial("numbers/flipped-import-export", "N2", EXPORT, says=("iter_0000000",), arrange=_flipped_import),
    Trial("numbers/hard-link", "N3", CHECK, code=0, arrange=_linked(tarfile.LNKTYPE, "s0.jpg")),
    Trial(
        "numbers/symbolic-link",
        "N3",
        CHECK,
        code=None,
        never=("no sample would be left out",),
        arrange=_linked(tarfile.SYMTYPE, "/a.jpg"),
    ),
    _without_effect("--fp8-recipe delayed", "--fp8"),
    _without_effect("--fp8-format e4m3", "--fp8"),
    _without_effect("--spike-thr 3", "--alert-spike"),
    _without_effect("model.recompute_method=block", "recompute"),
    _without_effect("model.recompute_num_layers=2", "recompute"),
    _without_effect("data.packing_buffer_size=7", "--packing"),
    Trial("numbers/train-iters-of-26-digits", "N7", f"{SHOW} --train-iters {DIGITS}", says=("train_iters",)),
    Trial("numbers/train-iters-0", "N7", f"{SHOW} --train-iters 0", says=("train_iters",), never=("missing",)),
    Trial("numbers/nan-weight", "N7", IMPORT, code=0, says=(_NORM,), arrange=_nan),
]
