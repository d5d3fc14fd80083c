"""Is eyas right on this GPU, and how fast? Random weights in the shapes of Llama-3.1-8B; tests/gpu/check.sh runs it.

    numerics     one training step, forward and backward, against the reference on the CPU        (tests/gpu/numerics.py)
    step         speed and memory of a step on packs of 8,192 tokens                         (tests/benchmarks/train.py)
    extraction   the target's states to disk, beside its bare forward passes                    (tests/gpu/random_run.py)
    training     some epochs on those states with the training loop: does the loss fall?        (tests/gpu/random_run.py)

Each part prints its figures as they come and appends a line of JSON. Exit code 1 says that a part failed, 2 that the
check cannot run here.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eyas.recipes.hardware import nominal_flops
from tests.benchmarks.train import in_process, line, parse
from tests.benchmarks.train_cells import Cell, Precision
from tests.gpu.numerics import LIMITS, compare
from tests.gpu.random_run import extract, train

GIB = 2**30
PARTS = ("numerics", "step", "extraction", "training")
PACKAGES = ("torch", "transformers", "accelerate", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is done.

    Attributes:
        target_layers: of the random target. numerics_tokens: the CPU computes them too, with dense masks.
        step_tokens: of the pack of a step, and of a step of the training. step_ttt_steps: each is a cell.
        extracted_tokens: what the target runs over and the disk holds.
        gemm_seconds: for the rate of plain products, per shape.
    """

    preset: str
    target_layers: int
    numerics_tokens: int
    step_tokens: int
    step_ttt_steps: tuple[int, ...]
    step_repeats: int
    document_tokens: int
    extracted_tokens: int
    epochs: int
    gemm_seconds: float


FULL = Scale(
    preset="llama-3.1-8b",
    target_layers=32,
    numerics_tokens=192,
    step_tokens=8192,
    step_ttt_steps=(3, 7),
    step_repeats=20,
    document_tokens=1024,
    extracted_tokens=65_536,
    epochs=3,
    gemm_seconds=0.5,
)
DRY = Scale(
    preset="tiny",
    target_layers=4,
    numerics_tokens=128,
    step_tokens=256,
    step_ttt_steps=(3,),
    step_repeats=1,
    document_tokens=64,
    extracted_tokens=1024,
    epochs=3,
    gemm_seconds=0.0,
)


class Check:
    """Runs the parts on a device, and remembers what failed."""

    def __init__(self, scale: Scale, *, device: torch.device, work: Path, out: Path) -> None:
        self.scale, self.device, self.work, self.out = scale, device, work, out
        self.peak = nominal_flops(device_name(device))
        self.failed: list[str] = []

    def parts(self) -> dict[str, Callable[[], bool]]:
        """All parts by name, in their order."""
        return {
            "numerics": self.numerics,
            **{
                f"step K={ttt_steps}": partial(self.step, ttt_steps=ttt_steps)
                for ttt_steps in self.scale.step_ttt_steps
            },
            "extraction": self.extraction,
            "training": self.training,
        }

    def introduce(self) -> None:
        """Say what is checked, on what."""
        name, versions = device_name(self.device), {each: importlib.metadata.version(each) for each in PACKAGES}
        peak = "not known" if self.peak is None else f"{self.peak / 1e12:,.0f} TFLOP/s"
        shown = ", ".join(f"{package} {version}" for package, version in versions.items())
        self.say(f"{name}, bf16 peak by its maker: {peak}; {self.scale.preset} shapes; {shown}\n")
        self.record("device", {"name": name, "date": time.strftime("%F"), **versions})

    def run(self, name: str, part: Callable[[], bool]) -> None:
        """Run one part; one that raises has failed, and the others still run."""
        begin = time.perf_counter()
        try:
            good = part()
        except Exception:
            traceback.print_exc()
            good = False
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.say(f"{name:11} {'ok' if good else 'FAILED'} in {time.perf_counter() - begin:.0f} s\n")
        if not good:
            self.failed.append(name)

    def say(self, text: str) -> None:
        """Print at once: the script may be stopped by its time limit."""
        print(text, flush=True)

    def record(self, part: str, figures: dict[str, Any]) -> None:
        """Append the figures of a part to the file."""
        with self.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"part": part, **figures}) + "\n")

    def cell(self, *, tokens: int, ttt_steps: int, precision: Precision = "bf16") -> Cell:
        """A cell of the benchmark at this scale."""
        return Cell(
            preset=self.scale.preset,
            tokens=tokens,
            ttt_steps=ttt_steps,
            answer_share=0.75,
            precision=precision,
            document_tokens=self.scale.document_tokens,
        )

    def numerics(self) -> bool:
        """A step against the reference, in float32 and in bfloat16."""
        cell = self.cell(tokens=self.scale.numerics_tokens, ttt_steps=3, precision="fp32")
        found = compare(cell, device=self.device)
        for each in found:
            loss, gradient = LIMITS[each.precision]
            self.say(
                f"{each.precision}  loss {each.loss:.6f}, CPU reference {each.reference_loss:.6f} (off by "
                f"{each.loss_error:.1e}, limit {loss:.0e}); gradient off by {each.gradient:.1e} in {each.parameter} "
                f"(limit {gradient:.0e})"
            )
            self.record("numerics", asdict(each))
        return all(each.fits for each in found)

    def step(self, *, ttt_steps: int) -> bool:
        """Speed of a step, as tests/benchmarks/train.py measures it, in a process of its own."""
        scale = self.scale
        options = ["--device", self.device.type, "--repeats", str(scale.step_repeats)]
        options += ["--gemm-seconds", str(scale.gemm_seconds), "--threads", str(torch.get_num_threads())]
        figures = in_process(self.cell(tokens=scale.step_tokens, ttt_steps=ttt_steps), "ours", parse(options))
        if "error" in figures:
            raise RuntimeError(f"the process of the step {figures['error']}")
        figures["mfu"] = self.mfu(figures["flops_per_second"])
        self.say(f"T={scale.step_tokens} K={ttt_steps} bf16  {line(figures)}  {shown_mfu(figures['mfu'])}")
        self.record("step", figures)
        return math.isfinite(figures["loss"])

    def extraction(self) -> bool:
        """The extract stage beside bare forward passes."""
        scale = self.scale
        found = extract(
            self.work,
            self.cell(tokens=scale.extracted_tokens, ttt_steps=3),
            num_layers=scale.target_layers,
            batch_tokens=scale.step_tokens,
            device=self.device,
        )
        mfu = self.mfu(found.flops / found.bare_seconds)
        self.say(
            f"{found.tokens:,} tokens, {scale.target_layers} layers: bare {found.tokens / found.bare_seconds:,.0f} tok/s "
            f"({shown_mfu(mfu)}), extraction {found.tokens / found.seconds:,.0f} tok/s "
            f"({found.bare_seconds / found.seconds:.0%} of bare), {found.store_bytes / found.seconds / 1e9:.2f} GB/s to "
            f"disk, peak {found.memory_bytes / GIB:.1f} GiB"
        )
        self.record("extraction", asdict(found) | {"mfu": mfu})
        return True

    def training(self) -> bool:
        """The training loop on the extracted states."""
        scale = self.scale
        cell = self.cell(tokens=scale.extracted_tokens, ttt_steps=3)
        found = train(self.work, cell, batch_tokens=scale.step_tokens, epochs=scale.epochs, precision="bf16")
        self.say(
            f"{found.steps} steps: loss {found.first_loss:.4f} -> {found.last_loss:.4f}, {found.tokens_per_second:,.0f} "
            f"tok/s, {found.share_of} {found.share:.0%}, peak {found.memory_bytes / GIB:.1f} GiB"
        )
        self.record("training", asdict(found))
        return found.last_loss < found.first_loss

    def mfu(self, flops_per_second: float) -> float | None:
        """Share of the maker's bf16 rate; None for a device that is not known by name."""
        return None if self.peak is None else flops_per_second / self.peak


def device_name(device: torch.device) -> str:
    """What its driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def shown_mfu(mfu: float | None) -> str:
    """MFU in words."""
    return "MFU not known for this device" if mfu is None else f"MFU {mfu:.0%}"


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dry", action="store_true", help="tiny shapes, on the CPU where there is no GPU: try the script"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: the GPU, and the CPU for --dry without one")
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", default=PARTS, help="some of the parts; training reads extraction's"
    )
    parser.add_argument("--work", type=Path, required=True, help="empty directory for temporary files, about 15 GB")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.jsonl"), help="file that figures are appended to")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run all parts; the exit code says whether the device is right."""
    arguments = parse_arguments(argv)
    cuda = torch.cuda.is_available()
    kind = arguments.device or ("cpu" if arguments.dry and not cuda else "cuda")
    if kind == "cuda" and not cuda:
        print("error: torch sees no GPU here; --dry tries the script on the CPU with tiny shapes", file=sys.stderr)
        return 2
    scale = DRY if arguments.dry else FULL
    check = Check(scale, device=torch.device(kind), work=arguments.work, out=arguments.out)
    check.introduce()
    for name, part in check.parts().items():
        if name.split()[0] in arguments.only:
            check.run(name, part)
    check.say(f"FAILED: {', '.join(check.failed)}" if check.failed else f"all parts passed; figures in {arguments.out}")
    return 1 if check.failed else 0


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as an exception does, so that the process of a step does not outlive it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(sys.argv[1:]))
