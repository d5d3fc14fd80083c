"""Speed and memory of a training step, beside the machine's matrix products and beside speculators 0.9.

    python -m tests.benchmarks.train --against speculators --tokens 2048 --ttt-steps 3 7 --answer-share 0.1 0.75 \\
        --precision fp32 bf16 --json cells.jsonl
    python -m tests.benchmarks.train --preset llama-3.1-8b --tokens 8192 --ttt-steps 3 --precision bf16
    python -m tests.benchmarks.train --quality --run RUN_DIR --seconds 400 --out DIR      (train_quality.py)

Weights, tokens and states are random in published shapes; a cell is one pack of chat-like documents (train_cells.py), and
everyone trains on the same pack. Each arm of each cell runs in a process of its own, arms in alternation `--starts` times:

    ours          documents -> pack -> forward, backward, metrics, clip, AdamW (train_ours.py); packing is in the time on CPU
    speculators   its model, loss and optimiser on its own collated batch, made before (train_peer.py)

Useful FLOP/s are the operations that the loss needs (heads/flops.py) by seconds of a step: the same number for both arms.
`of GEMM` is their share of the fastest of several large matrix products in the same type, measured in the same process.
`step` is memory above what was held before the first step, `peak` all of it.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eyas.heads.flops import training_flops
from tests.benchmarks.train_cells import PRESETS, Cell, chat_documents, count_work
from tests.benchmarks.train_measure import measure_gemm, measure_steps

ROOT = Path(__file__).resolve().parents[2]
PEER = "speculators"
OUT_OF_MEMORY = errno.ENOMEM
"""Exit code of a process whose cell does not fit into the GPU's memory."""
PEER_BYTES_PER_PAIR = 10
"""Bytes that the peer's eager attention keeps per head and pair of query and key, as measured at 2048 slots and 7 steps."""


def main() -> None:
    """Parse the command line and run what it asks for."""
    arguments = parse(sys.argv[1:])
    if arguments.child is not None:
        try:
            print(json.dumps(run_cell(Cell(**json.loads(arguments.child)), arguments)))
        except torch.OutOfMemoryError as error:
            print(error, file=sys.stderr)
            sys.exit(OUT_OF_MEMORY)
    elif arguments.quality:
        from tests.benchmarks.train_quality import compare_quality

        compare_quality(arguments)
    else:
        run_cells(arguments)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="of the pack of a step")
    parser.add_argument("--answer-share", type=float, nargs="+", default=[0.1, 0.3, 0.75, 1.0])
    parser.add_argument("--ttt-steps", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--precision", choices=["fp32", "bf16"], nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--document-tokens", type=int, default=1024, help="mean length of a document")
    parser.add_argument("--train-readout", action="store_true", help="ours trains lm_head as well; the peer never does")
    parser.add_argument("--against", choices=[PEER], help="measure this too, and print ratios")
    parser.add_argument("--repeats", type=int, default=5, help="counted steps of a process")
    parser.add_argument("--warmup", type=int, help="steps before them; 1, and 3 on CUDA")
    parser.add_argument("--starts", type=int, default=1, help="fresh processes of each arm, alternating")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gemm-seconds", type=float, default=0.5, help="per shape, before the steps and after them")
    parser.add_argument("--json", type=Path, metavar="OUT", help="append a line per process")
    quality = parser.add_argument_group("--quality: heads trained for the same time on a run's features")
    quality.add_argument("--quality", action="store_true")
    quality.add_argument("--run", type=Path, metavar="RUN_DIR", help="with its stages prepare and features")
    quality.add_argument("--recipe", default="smollm2-135m-eagle3-cpu", help="our settings")
    quality.add_argument("--seconds", type=float, default=400.0)
    quality.add_argument("--peer-optimizer", choices=["muon", "adamw"], default="muon", help="muon is its default")
    quality.add_argument("--peer-rate", type=float, default=1e-3, help="1e-3 is its default")
    quality.add_argument("--peer-precision", choices=["fp32", "bf16"], help="left out: the recipe's")
    quality.add_argument("--prompts", type=int, default=16, help="held-out prompts to serve; 0 = do not serve")
    quality.add_argument("--out", type=Path, help="directory for the heads and quality.json")
    parser.add_argument("--arm-process", choices=["ours", PEER], help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--arm", choices=["ours", PEER], default="ours", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_cells(arguments: argparse.Namespace) -> None:
    """Every cell in the product of the options, printed as it is done."""
    arms = ["ours"] if arguments.against is None else ["ours", arguments.against]
    print(f"{arguments.preset}, {arguments.device}, {arguments.threads} threads, torch {torch.__version__}")
    grid = itertools.product(arguments.precision, arguments.tokens, arguments.ttt_steps, arguments.answer_share)
    for precision, tokens, ttt_steps, share in grid:
        cell = Cell(
            preset=arguments.preset,
            tokens=tokens,
            ttt_steps=ttt_steps,
            answer_share=share,
            precision=precision,
            document_tokens=arguments.document_tokens,
            train_readout=arguments.train_readout,
        )
        print(f"\nT={tokens} K={ttt_steps} answers {share:.0%} {precision}")
        records: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for _, arm in itertools.product(range(arguments.starts), arms):
            record = in_process(cell, arm, arguments)
            records[arm].append(record)
            print(f"  {arm:12} {line(record)}", flush=True)
            if arguments.json is not None:
                with arguments.json.open("a") as stream:
                    stream.write(json.dumps(record) + "\n")
        if len(arms) == 2:
            print(f"  {'ratio':12} {ratio(*records.values())}", flush=True)


def in_process(cell: Cell, arm: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one arm of a cell in a fresh process; the record has `error` instead of figures when it did not end well."""
    header = {"arm": arm, **asdict(cell)}
    if arm == PEER and arguments.device == "cpu":
        needed, free = peer_bytes(cell), _available_bytes()
        if needed > free:
            return header | {"error": f"needs about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"}
    command = [sys.executable, "-m", "tests.benchmarks.train", "--child", json.dumps(asdict(cell)), "--arm", arm]
    for name in ("repeats", "threads", "device", "gemm_seconds", "warmup"):
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, text=True, stdout=subprocess.PIPE)
    if done.returncode == OUT_OF_MEMORY:
        return header | {"error": "ran out of memory", "out_of_memory": True}
    if done.returncode:
        return header | {"error": f"ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_cell(cell: Cell, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one arm of a cell in this process."""
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    documents = chat_documents(cell)
    work = count_work(documents, ttt_steps=cell.ttt_steps)
    dtype = torch.bfloat16 if cell.precision == "bf16" else torch.float32
    gemms = [measure_gemm(dtype, device=device, seconds_each=arguments.gemm_seconds)]
    if arguments.arm == PEER:
        from tests.benchmarks.train_peer import PeerStep

        step = PeerStep(cell, device=device, documents=documents)
        trained_K = step.rows_K
    else:
        from tests.benchmarks.train_ours import OurStep

        step = OurStep(cell, device=device, documents=documents)
        trained_K = step.rows_K
    warmup = arguments.warmup if arguments.warmup is not None else 3 if device.type == "cuda" else 1
    steps = measure_steps(step, device=device, warmup=warmup, repeats=arguments.repeats)
    gemms.append(measure_gemm(dtype, device=device, seconds_each=arguments.gemm_seconds))
    gemm = max(gemms, key=lambda found: found.flops_per_second)
    flops = training_flops(
        cell.config,
        num_slots=work.num_slots,
        rows_K=work.rows_K,
        attended_K=work.attended_K,
        num_teacher_rows=work.num_teacher_rows,
        train_readout=cell.train_readout,
    )
    return {
        "arm": arguments.arm,
        **asdict(cell),
        **asdict(work),
        "rows": work.rows,
        "trained_rows_K": list(trained_K),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": arguments.threads,
        "seconds": steps.seconds,
        "seconds_median": steps.median,
        "tokens_per_second": work.tokens / steps.median,
        "rows_per_second": work.rows / steps.median,
        "flops": flops,
        "flops_per_second": flops / steps.median,
        "gemm_flops_per_second": gemm.flops_per_second,
        "gemm_shape": gemm.shape,
        "share_of_gemm": flops / steps.median / gemm.flops_per_second,
        "step_bytes": steps.bytes_peak - steps.bytes_before,
        "peak_bytes": steps.bytes_peak,
        "loss": steps.loss,
        "torch": torch.__version__,
    }


def line(record: dict[str, Any]) -> str:
    """A record as a line of the table."""
    if "error" in record:
        return record["error"]
    rows, inner, columns = record["gemm_shape"]
    return (
        f"{record['tokens_per_second']:9,.0f} tok/s {record['rows_per_second']:9,.0f} slots/s  "
        f"{record['seconds_median']:.3f} s (min {min(record['seconds']):.3f})  "
        f"{record['flops_per_second'] / 1e9:8,.0f} GFLOP/s {record['share_of_gemm']:4.0%} of GEMM "
        f"{record['gemm_flops_per_second'] / 1e9:,.0f} ({rows}x{inner}x{columns})  "
        f"step {record['step_bytes'] / 2**30:.2f} peak {record['peak_bytes'] / 2**30:.2f} GiB"
    )


def ratio(ours: list[dict[str, Any]], peer: list[dict[str, Any]]) -> str:
    """Speed and memory of ours over the peer's: medians over all steps of all starts, and the largest memory."""
    if any("error" in record for record in (*ours, *peer)):
        return "none"
    times = [statistics.median(s for record in arm for s in record["seconds"]) for arm in (ours, peer)]
    memory = [[max(record[name] for record in arm) for arm in (ours, peer)] for name in ("step_bytes", "peak_bytes")]
    shares = [f"{mine / theirs:.2f}" for mine, theirs in memory]
    return f"{times[1] / times[0]:.2f}x the speed, memory of a step {shares[0]} and peak {shares[1]} of the peer's"


def peer_bytes(cell: Cell) -> float:
    """About what the peer's step needs on CPU: masked scores and weights of all slots at all steps, and its logits."""
    pairs = cell.config.num_attention_heads * cell.tokens**2 * cell.ttt_steps * (cell.ttt_steps + 1) / 2
    logits = cell.tokens * cell.config.draft_vocab_size * (cell.ttt_steps + 1) * 8
    return PEER_BYTES_PER_PAIR * pairs + logits


def _available_bytes() -> int:
    return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
