"""Import and export of a whole LLaVA, compared with `cp` of the same bytes: GB/s, ratio, peak memory.

    python -m benchmarks.convert --params 1B 3B 7B --layouts 1,1 4,2 8,4 --dir /big/disk --json out.json

Makes a random bf16 LLaVA (dims of Llama 3.2 1B and 3B, LLaVA-1.5 7B, and a small one, each with CLIP-L/336), converts
it with the same commands that a user types, and removes everything again. Before every measurement the source's pages
are put into memory, or out of it where they do not fit (--cache), earlier writes are on disk, and nothing happens for
as long as a command takes to start (--idle): on a virtual machine, memory that was freed a moment ago is several times
faster than memory that the host has to find again, and both must start the same way. A conversion ends with its files
on disk; `cp + sync` does too, `cp` alone leaves them in memory. `s` are the conversion's own seconds, as printed;
`command s` add starting Python and importing torch, megatron-core and transformers. Peak RSS is the sum of what each
process had at its own peak, pages of mapped files included. With --rounds, the median of each time is shown. The copy
that cp made is removed before the command starts: the disk holds at most three copies of the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from llava_mcore.cli.base.shared_flags import default_workers
from llava_mcore.files.hf_files import write_index
from llava_mcore.files.hf_folder import plan_file, write_tensors

TEXTS = {
    "0.1B": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 4, "vocab_size": 32000},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32, "vocab_size": 32064},
}  # fmt: skip
VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
          "image_size": 336, "patch_size": 14}  # fmt: skip
COLUMNS = ("step", "tp, pp", "workers", "GB/s", "÷ cp", "÷ cp + sync", "s", "command s", "cp s", "cp + sync s",
           "peak RSS GB")  # fmt: skip
COPIES_AT_ONCE = 3  # source, checkpoint, export (or the copy that cp makes)


@dataclass(frozen=True)
class Setting:
    """What a row is measured at. `idle` in seconds."""

    tp: int
    pp: int
    workers: int
    cache: str
    idle: float
    rounds: int


@dataclass(frozen=True)
class Row:
    """One measurement. GB are 1e9 bytes of weights; seconds of the conversion alone and of the whole command."""

    params: str
    gigabytes: float
    step: str
    tp: int
    pp: int
    workers: int
    seconds: float
    command_seconds: float
    cp_seconds: float
    cp_sync_seconds: float
    peak_rss_gb: float

    @property
    def speed(self) -> float:
        return self.gigabytes / self.seconds


def make_model(folder: Path, params: str) -> tuple[int, int]:
    """Write a random folder, one tensor in memory at a time; return the bytes of all tensors and of the largest."""
    text = LlamaConfig(**TEXTS[params], head_dim=None, tie_word_embeddings=params != "7B", dtype="bfloat16")
    vision = CLIPVisionConfig(**VISION)
    tie = params != "7B"
    config = LlavaConfig(vision_config=vision, text_config=text, tie_word_embeddings=tie, dtype="bfloat16")
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in tied}
    sizes = {name: int(np.prod(shape)) * 2 for name, shape in shapes.items()}
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=lambda x: x, filename_pattern="model{suffix}.safetensors", max_shard_size="5GB"
    )
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    generator = np.random.Generator(np.random.SFC64(0))
    for file, names in split.filename_to_tensors.items():
        plan = plan_file(folder / file, {name: (torch.bfloat16, shapes[name]) for name in names})
        write_tensors(plan, ((name, random_bits(generator, shapes[name])) for name in names))
    if len(split.filename_to_tensors) > 1:
        write_index(folder, split.tensor_to_filename, sum(sizes.values()))
    return sum(sizes.values()), max(sizes.values())


def random_bits(generator: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Return random bf16 bits, NaN and infinity among them: a conversion must handle them."""
    count = int(np.prod(shape))
    words = generator.integers(0, 2**64, -(-count // 4), dtype=np.uint64)
    return torch.from_numpy(words.view(np.uint16)[:count]).view(torch.bfloat16).view(shape)


def files_of(folder: Path) -> Iterator[Path]:
    """Yield all files below."""
    return (path for path in folder.rglob("*") if path.is_file())


def settle(source: Path, cache: str) -> None:
    """Put a folder's pages into memory or out of it, and everything written before on disk."""
    os.sync()
    for path in files_of(source):
        with path.open("rb", buffering=0) as file:
            if cache == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while cache == "warm" and file.read(64 << 20):
                pass


def time_cp(source: Path, target: Path, setting: Setting) -> tuple[float, float]:
    """Return the seconds of `cp -r`, and of it with everything on disk."""
    settle(source, setting.cache)
    time.sleep(setting.idle)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    copied = time.perf_counter() - start
    for path in files_of(target):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    synced = time.perf_counter() - start
    shutil.rmtree(target)
    return copied, synced


def run_watched(command: list[str]) -> tuple[str, float, int]:
    """Run a command; return what it printed, its seconds, and the sum of its processes' peak RSS in bytes.

    The system records each process's peak itself, so sampling it rarely is enough, and leaves the cores to the command.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as printed:
        process = psutil.Popen(command, stdout=printed)
        peaks: dict[int, int] = {}
        while process.poll() is None:
            for pid in (process.pid, *(child.pid for child in process.children(recursive=True))):
                with contextlib.suppress(OSError):  # it has just ended
                    peaks[pid] = max(read_peak(pid), peaks.get(pid, 0))
            time.sleep(0.1)
        seconds = time.perf_counter() - start
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
        printed.seek(0)
        return printed.read(), seconds, sum(peaks.values())


def read_peak(pid: int) -> int:
    """Return a process's largest RSS so far in bytes; 0 of one that has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def measure(params: str, num_bytes: int, step: str, folders: tuple[Path, Path], setting: Setting) -> Row:
    """Measure one conversion, and `cp` of its source just before; the median of all rounds of each."""
    source, target = folders
    flags = ("--hf-dir", "--megatron-dir") if step == "import-hf" else ("--megatron-dir", "--hf-dir")
    command = [sys.executable, "-m", "llava_mcore", step, flags[0], str(source), flags[1], str(target)]
    command += ["--tp", str(setting.tp), "--pp", str(setting.pp), "--workers", str(setting.workers)]
    rounds = []
    for _ in range(setting.rounds):
        shutil.rmtree(target, ignore_errors=True)
        cp, cp_sync = time_cp(source, target, setting)
        settle(source, setting.cache)  # the command's own start is the rest
        printed, whole, rss = run_watched(command)
        found = re.search(r" in ([\d.]+) s", printed)
        assert found is not None, printed
        rounds.append((float(found[1]), whole, cp, cp_sync, rss / 1e9))
    *times, peaks = zip(*rounds, strict=True)
    return Row(params, num_bytes / 1e9, step, setting.tp, setting.pp, setting.workers, *map(median, times), max(peaks))


def measure_all(args: argparse.Namespace, folder: Path, show: Callable[[Row], None]) -> list[Row]:
    """Run everything that was asked for."""
    rows = []
    for params in args.params:
        num_bytes, largest = make_model(folder / "hf", params)
        memory = psutil.virtual_memory().total
        cache = args.cache or ("warm" if COPIES_AT_ONCE * num_bytes < memory else "cold")
        sizes = f"{num_bytes / 1e9:.2f} GB, largest tensor {largest / 1e9:.2f} GB"
        print(f"\n{params}: {sizes}, page cache {cache}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
        print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
        for tp, pp in args.layouts:
            for workers in args.workers:
                setting = Setting(tp, pp, workers, cache, args.idle, args.rounds)
                for step, source, target in (("import-hf", "hf", "megatron"), ("export-hf", "megatron", "back")):
                    rows.append(measure(params, num_bytes, step, (folder / source, folder / target), setting))
                    show(rows[-1])
                shutil.rmtree(folder / "megatron")
                shutil.rmtree(folder / "back")
        shutil.rmtree(folder / "hf")
    return rows


def show(r: Row) -> None:
    """Print one line of the table."""
    ratios = [f"{x / r.seconds:.2f}" for x in (r.cp_seconds, r.cp_sync_seconds)]
    times = [f"{x:.1f}" for x in (r.seconds, r.command_seconds, r.cp_seconds, r.cp_sync_seconds)]
    cells = [r.step, f"{r.tp}, {r.pp}", str(r.workers), f"{r.speed:.2f}", *ratios, *times]
    print(f"| {' | '.join(cells)} | {r.peak_rss_gb:.2f} |", flush=True)


def layout_of(text: str) -> tuple[int, int]:
    """Parse "4,2"."""
    tp, pp = text.split(",")
    return int(tp), int(pp)


def main() -> None:
    """Parse the command line, check the disk, measure, print, write, clean up."""
    parser = argparse.ArgumentParser(description="Conversion compared with cp: speed and memory")
    parser.add_argument("--params", nargs="+", choices=TEXTS, default=["1B"])
    parser.add_argument("--layouts", nargs="+", type=layout_of, default=[(1, 1), (4, 2), (8, 4)], metavar="TP,PP")
    parser.add_argument("--workers", nargs="+", type=int, default=[default_workers()])
    parser.add_argument("--cache", choices=["warm", "cold"], help="default: warm where three copies fit into memory")
    parser.add_argument("--idle", type=float, default=10, help="seconds of rest before cp (default 10)")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds, whose median is shown (default 1)")
    parser.add_argument("--dir", type=Path, help="where to work (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    needed = max({"0.1B": 0.9, "1B": 3.2, "3B": 7.1, "7B": 14.2}[x] for x in args.params) * COPIES_AT_ONCE
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        free = shutil.disk_usage(folder).free / 1e9
        if free < needed:
            raise SystemExit(f"{folder}: needs {needed:.0f} GB, {free:.0f} GB are free; choose another --dir")
        rows = measure_all(args, Path(folder), show)
    if args.json is not None:
        found = {"cores": os.cpu_count(), "memory_gb": psutil.virtual_memory().total / 1e9, "torch": torch.__version__}
        args.json.write_text(json.dumps(found | {"rows": [asdict(r) for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
