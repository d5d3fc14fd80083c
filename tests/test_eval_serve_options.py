"""The command with which a schedule is served: every setting of the measured engine, the same as the open loop's."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from eyas.eval.cost.schedule import choose_schedule
from eyas.eval.cost.serving import serve_command, write_schedule
from eyas.eval.openloop.server import HOST
from eyas.eval.openloop.server import serve_command as open_loop_command
from eyas.eval.plan import CellPlan, StartPlan
from eyas.eval.records import AR, StartRecord
from eyas.eval.serve_options import ServedEngine, engine_options, served_engine
from eyas.heads.files import read_json
from eyas.heads.serving import on_cpu
from tests.cost_cells import facts, measured

BASE = {"method": "eagle3", "model": "head", "num_speculative_tokens": 5}
ENGINE = ServedEngine(
    target_dir="a target",
    trust_remote_code=True,
    dtype="bfloat16",
    max_model_len=1024,
    max_num_seqs=16,
    seed=7,
    enforce_eager=True,
    prefix_caching=False,
    tensor_parallel_size=2,
    gpu_memory_utilization=0.5,
    max_num_batched_tokens=16384,
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "LD_PRELOAD": "/a place/libiomp5.so",
    "HOME": "/root",
}


@pytest.mark.parametrize("on_cpu", [True, False])
def test_serve_command_has_every_setting_of_the_measured_engine(on_cpu: bool) -> None:
    words = serve_command(replace(ENGINE, speculative_config=BASE), on_cpu=on_cpu)
    start = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"] if on_cpu else ["vllm", "serve"]
    assert words[: len(start) + 1] == [*start, "a target"]
    options = dict(pairwise(words))
    common = {"--dtype": "bfloat16", "--max-model-len": "1024", "--max-num-seqs": "16", "--seed": "7"}
    common |= {"--generation-config": "vllm", "--tensor-parallel-size": "2"}
    common |= {"--max-num-batched-tokens": "4096" if on_cpu else "16384"}
    assert common.items() <= options.items()
    assert json.loads(options["--speculative-config"]) == BASE
    assert {"--trust-remote-code", "--enforce-eager", "--no-enable-prefix-caching"} <= set(words)
    assert ("--no-enable-chunked-prefill" in words) == on_cpu
    assert ("--gpu-memory-utilization" in words) != on_cpu
    assert "--speculative-config" not in serve_command(ENGINE, on_cpu=on_cpu)


def test_the_schedule_is_served_as_the_open_loop_was_measured() -> None:
    """The two commands name the same engine: what one has beyond the other is its port, its name and its metrics."""
    engine = replace(ENGINE, speculative_config=BASE)
    handed_over = Counter(serve_command(engine, on_cpu=on_cpu()))
    measured_with = Counter(open_loop_command(engine, port=1, name="n"))
    target = Counter(["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "vllm", "serve", "a target"])
    assert not handed_over - measured_with - target
    own = ["--host", HOST, "--port", "1", "--served-model-name", "n", "--uvicorn-log-level", "warning"]
    own += ["--enable-per-request-metrics", "--per-request-spec-decode-metrics", "summary"]
    assert measured_with - handed_over - target - Counter([sys.executable, "vllm.entrypoints.cli.main"]) == Counter(own)


def test_a_plan_is_served_with_its_own_settings() -> None:
    """On a GPU vLLM's step of a server is shorter than that of the grid's engines, so the grid's own is passed."""
    plan = StartPlan(
        target_dir="a target",
        trust_remote_code=True,
        dtype="bfloat16",
        max_model_len=1024,
        seed=7,
        enforce_eager=True,
        stop_token_ids=[],
        warmup=[1],
        cells=[CellPlan("heldout", size, 0.0, 8, 0, []) for size in (1, 16)],
        tensor_parallel_size=2,
        gpu_memory_utilization=0.5,
    )
    description = {"engine": {"scheduler_config": {"max_num_batched_tokens": 16384}}}
    start = StartRecord(AR, "ar", 0, 0, "starts", "grid", None, 0, description, [])
    assert served_engine(plan, measured=[start]) == ENGINE
    assert served_engine(plan, measured=[]) == replace(ENGINE, max_num_batched_tokens=None)


@pytest.mark.parametrize("pays", [True, False])
def test_files_to_serve_with(tmp_path: Path, pays: bool) -> None:
    rates = {1: {"ar": 40, "k3": 60 if pays else 30}}
    schedule = choose_schedule(measured(rates), facts({"k3": 3}))
    content = write_schedule(tmp_path, schedule, base=BASE, engine=ENGINE, environment=ENVIRONMENT, on_cpu=True)
    assert read_json(tmp_path / "schedule.json") == json.loads(json.dumps(content))
    assert read_json(tmp_path / "speculative_config.json") == schedule.speculative_config(BASE)
    assert ("--speculative-config" in content["serve_command"]) == pays
    assert content["serve_environment"] == {name: ENVIRONMENT[name] for name in ENVIRONMENT if name != "HOME"}
    words = shlex.split(content["serve_command_line"])
    assert words[:3] == ["LD_PRELOAD=/a place/libiomp5.so", "OMP_NUM_THREADS=2", "VLLM_CPU_KVCACHE_SPACE=1"]
    assert words[3:] == content["serve_command"]


def test_vllm_itself_reads_every_option_as_it_is_meant() -> None:
    """The installed server's own parser, in a process of its own (it imports torch)."""
    engine = replace(ENGINE, speculative_config=BASE)
    code = (
        "import json, sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    print(json.dumps({name: value for name, value in vars(parser.parse_args(words)).items() if name in sys.argv[2:]}))\n"
    )
    meant = {"max_num_seqs": 16, "seed": 7, "tensor_parallel_size": 2, "dtype": "bfloat16", "max_model_len": 1024}
    meant |= {"trust_remote_code": True, "enforce_eager": True, "enable_prefix_caching": False}
    meant |= {"generation_config": "vllm", "speculative_config": BASE}
    differ = ["enable_chunked_prefill", "max_num_batched_tokens", "gpu_memory_utilization"]
    commands = json.dumps([["--model", "t", *engine_options(engine, on_cpu=cpu)] for cpu in (True, False)])
    done = subprocess.run(
        [sys.executable, "-c", code, commands, *meant, *differ],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cpu, gpu = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert meant.items() <= cpu.items()
    assert meant.items() <= gpu.items()
    assert [cpu[name] for name in differ[:2]] == [False, 4096]
    assert [gpu[name] for name in differ] == [None, 16384, 0.5]
