"""Is eyas right on this GPU, and how fast? Random weights in the shapes of Llama-3.1-8B; tests/gpu/check.sh runs it.

    numerics     one training step, forward and backward, against the reference on the CPU        (tests/gpu/numerics.py)
    step         speed and memory of a step on packs of 8,192 tokens                         (tests/benchmarks/train.py)
    extraction   the target's states to disk, beside its bare forward passes                    (tests/gpu/random_run.py)
    training     some epochs on those states with the training loop: does the loss fall?        (tests/gpu/random_run.py)

Each part prints its figures as they come and appends a line of JSON. Exit code 1 says that a part failed, 2 that the
check, or a part for want of memory, cannot run here.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eyas.recipes.hardware import gib, nominal_flops
from tests.benchmarks.train import in_process, line, parse
from tests.benchmarks.train_cells import Cell, Precision
from tests.gpu.numerics import DOCUMENT_TOKENS, LIMITS, TOKENS, Difference, compare
from tests.gpu.packages import PACKAGES
from tests.gpu.preconditions import why_not
from tests.gpu.random_run import extract, train
from tests.gpu.states import STATES_LIMIT

FAILED, TOO_LARGE = "FAILED", "needs more memory than there is"
PARTS = ("numerics", "step", "extraction", "training")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is done.

    Attributes:
        target_layers: of the random target.
        step_tokens: of the pack of a step, and of a step of the training. step_ttt_steps: each is a cell.
        extracted_tokens: what the target runs over and the disk holds. extraction_repeats: timed turns of it.
        gemm_seconds: for the rate of plain products, per shape.
    """

    preset: str
    target_layers: int
    step_tokens: int
    step_ttt_steps: tuple[int, ...]
    step_repeats: int
    document_tokens: int
    extracted_tokens: int
    extraction_repeats: int
    epochs: int
    gemm_seconds: float


FULL = Scale(
    preset="llama-3.1-8b",
    target_layers=32,
    step_tokens=8192,
    step_ttt_steps=(3, 7),
    step_repeats=20,
    document_tokens=1024,
    extracted_tokens=65_536,
    extraction_repeats=3,
    epochs=3,
    gemm_seconds=0.5,
)
DRY = Scale(
    preset="tiny",
    target_layers=4,
    step_tokens=256,
    step_ttt_steps=(3,),
    step_repeats=1,
    document_tokens=64,
    extracted_tokens=1024,
    extraction_repeats=1,
    epochs=3,
    gemm_seconds=0.0,
)


class Check:
    """Runs the parts on a device, and remembers what failed."""

    def __init__(self, scale: Scale, *, device: torch.device, work: Path, out: Path) -> None:
        self.scale, self.device, self.work, self.out = scale, device, work, out
        self.peak = nominal_flops(device_name(device))
        self.ended_badly: dict[str, list[str]] = {FAILED: [], TOO_LARGE: []}

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
        peak = "not known" if self.peak is None else f"{self.peak / 1e12:,.0f} TFLOP/s (of its fastest form)"
        shown = ", ".join(f"{package} {version}" for package, version in versions.items())
        self.say(f"{name}, bf16 peak by its maker: {peak}; {self.scale.preset} shapes; {shown}\n")
        self.record("device", {"name": name, "date": time.strftime("%F"), **versions})

    def run(self, name: str, part: Callable[[], bool]) -> None:
        """Run one part; one that raises has failed, and the others still run."""
        begin = time.perf_counter()
        try:
            verdict = "ok" if part() else FAILED
        except (torch.OutOfMemoryError, MemoryError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            verdict = TOO_LARGE
        except Exception:
            traceback.print_exc()
            verdict = FAILED
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.say(f"{name:11} {verdict} in {time.perf_counter() - begin:.0f} s\n")
        if verdict != "ok":
            self.ended_badly[verdict].append(name)

    def say(self, text: str) -> None:
        """Print at once: the script may be stopped by its time limit."""
        print(text, flush=True)

    def record(self, part: str, figures: dict[str, Any]) -> None:
        """Append the figures of a part to the file."""
        with self.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"part": part, **figures}) + "\n")

    def cell(
        self, *, tokens: int, ttt_steps: int, precision: Precision = "bf16", document_tokens: int | None = None
    ) -> Cell:
        """A cell of the benchmark at this scale."""
        return Cell(
            preset=self.scale.preset,
            tokens=tokens,
            ttt_steps=ttt_steps,
            answer_share=0.75,
            precision=precision,
            document_tokens=document_tokens or self.scale.document_tokens,
        )

    def numerics(self) -> bool:
        """A step against the reference, in float32 and in bfloat16."""
        cell = self.cell(tokens=TOKENS, ttt_steps=3, precision="fp32", document_tokens=DOCUMENT_TOKENS)
        found = compare(cell, device=self.device)
        for each in found:
            self.say(shown_difference(each))
            self.record("numerics", asdict(each))
        return all(each.fits for each in found)

    def step(self, *, ttt_steps: int) -> bool:
        """Speed of a step, as tests/benchmarks/train.py measures it, in a process of its own."""
        scale = self.scale
        options = ["--device", self.device.type, "--repeats", str(scale.step_repeats)]
        options += ["--gemm-seconds", str(scale.gemm_seconds), "--threads", str(torch.get_num_threads())]
        figures = in_process(self.cell(tokens=scale.step_tokens, ttt_steps=ttt_steps), "ours", parse(options))
        if "error" in figures:
            raise (MemoryError if figures.get("out_of_memory") else RuntimeError)(
                f"the process of the step {figures['error']}"
            )
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
            repeats=scale.extraction_repeats,
            device=self.device,
        )
        mfu = self.mfu(found.flops / found.bare_seconds)
        self.say(
            f"{found.tokens:,} tokens, {scale.target_layers} layers: bare {found.tokens / found.bare_seconds:,.0f} tok/s "
            f"({shown_mfu(mfu)}, attention and padding not counted), extraction {found.tokens / found.seconds:,.0f} tok/s "
            f"({found.bare_seconds / found.seconds:.0%} of bare), {found.store_bytes / found.seconds / 1e9:.2f} GB/s "
            f"written, peak {gib(found.memory_bytes)}; states off by {found.states_error:.1e} (limit {STATES_LIMIT:.0e})"
        )
        self.record("extraction", asdict(found) | {"mfu": mfu})
        return found.states_error <= STATES_LIMIT

    def training(self) -> bool:
        """The training loop on the extracted states."""
        scale = self.scale
        cell = self.cell(tokens=scale.extracted_tokens, ttt_steps=3)
        found = train(self.work, cell, batch_tokens=scale.step_tokens, epochs=scale.epochs, precision="bf16")
        self.say(
            f"{found.steps} steps: mean loss of an epoch {found.first_loss:.4f} -> {found.last_loss:.4f}, {found.tokens_per_second:,.0f} "
            f"tok/s, {found.share_of} {found.share:.0%}, peak {gib(found.memory_bytes)}"
        )
        self.record("training", asdict(found))
        return found.last_loss < found.first_loss

    def mfu(self, flops_per_second: float) -> float | None:
        """Share of the maker's bf16 rate; None for a device that is not known by name."""
        return None if self.peak is None else flops_per_second / self.peak


def device_name(device: torch.device) -> str:
    """What its driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def shown_difference(found: Difference) -> str:
    """A comparison in words, with its limits."""
    limit = LIMITS[found.precision]
    return (
        f"{found.precision}  loss {found.loss:.6f}, CPU reference {found.reference_loss:.6f} (off by {found.loss_error:.1e}, limit "
        f"{limit.loss:.0e}); acceptance off by {found.acceptance_error:.1e} (limit {limit.acceptance:.0e}); hits {found.hits:.0f} "
        f"and {found.reference_hits:.0f} of {found.rows}; gradient off by {found.gradient:.1e} in {found.parameter} (limit "
        f"{limit.gradient:.0e})"
    )


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
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the code of a run takes a GPU wherever it sees one
    cuda = torch.cuda.is_available()
    kind = arguments.device or ("cpu" if arguments.dry and not cuda else "cuda")
    if kind == "cuda" and not cuda:
        print("error: torch sees no GPU here; --dry tries the script on the CPU with tiny shapes", file=sys.stderr)
        return 2
    reason = why_not(torch.device(kind), work=arguments.work, full=not arguments.dry)
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    scale = DRY if arguments.dry else FULL
    check = Check(scale, device=torch.device(kind), work=arguments.work, out=arguments.out)
    check.introduce()
    for name, part in check.parts().items():
        if name.split()[0] in arguments.only:
            check.run(name, part)
    for verdict, names in check.ended_badly.items():
        if names:
            check.say(f"{verdict}: {', '.join(names)}")
    if not any(check.ended_badly.values()):
        check.say(f"all parts passed; figures in {arguments.out}")
    return 1 if check.ended_badly[FAILED] else 2 if check.ended_badly[TOO_LARGE] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
