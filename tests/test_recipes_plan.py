"""`eyas plan`: arithmetic from configs alone, held against figures worked out by hand."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.recipes import estimate, plan
from eyas.recipes.cli import app
from eyas.recipes.estimate import HeadSize, Tokens
from eyas.recipes.fitting import VLLM_SHARE
from eyas.recipes.hardware import NAMED, find_hardware
from eyas.recipes.packaged_targets import packaged_targets
from eyas.recipes.target_size import TargetSize, read_target_size
from tests import tiny

QUICKSTART = "smollm2-135m-eagle3-cpu"
LLAMA_8B, QWEN3_30B, GPT_OSS_120B, GPT_OSS_20B = (
    packaged_targets()[model]
    for model in (
        "meta-llama/Llama-3.1-8B-Instruct",
        "Qwen/Qwen3-30B-A3B",
        "openai/gpt-oss-120b",
        "openai/gpt-oss-20b",
    )
)
# fc 3H x H, q k v of 2H, o and MLP, lm_head of 8,192 rows, four norms.
HEAD_8B = 3 * 4096**2 + 2 * 4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336 + 8192 * 4096 + 4 * 4096


def eyas(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """The quickstart for a target of which only the config is here, and for data that is not."""
    source = "data.sources=[{path: org/chats}]"
    where = [f"target.model={LLAMA_8B}", f"run_dir={tmp_path / 'run'}", "data.conversations=null", source]
    return [*where, "features.dtype=bfloat16", "data.max_length=2048", "data.max_train_tokens=null"]


def test_sizes_of_a_dense_and_a_sparse_target() -> None:
    dense = read_target_size(LLAMA_8B, dtype="bfloat16", trust_remote_code=False)
    assert dense.parameters == 8_030_261_248  # as the model card says
    assert dense.active_parameters == dense.parameters - 2 * 128256 * 4096
    assert dense.weight_bytes == dense.served_bytes("bfloat16") == 2 * dense.parameters
    assert dense.served_bytes("float32") == 4 * dense.parameters
    sparse = read_target_size(QWEN3_30B, dtype="bfloat16", trust_remote_code=False)
    assert sparse.parameters == pytest.approx(30.5e9, rel=0.01)
    # "3.3B activated" of the model card counts embedding and lm_head.
    assert sparse.active_parameters + 2 * 151936 * 2048 == pytest.approx(3.3e9, rel=0.03)


@pytest.mark.parametrize(("target", "gibibytes"), [(GPT_OSS_120B, 60.8), (GPT_OSS_20B, 12.8)])
def test_weights_in_mxfp4_take_what_the_published_files_take(target: Path, gibibytes: float) -> None:
    size = read_target_size(target, dtype="bfloat16", trust_remote_code=False)
    assert size.served_bytes("bfloat16") / 2**30 == pytest.approx(gibibytes, rel=0.005)  # arXiv 2508.10925, table 1
    assert size.weight_bytes == 2 * size.parameters


def test_the_plan_of_an_8b_target_from_its_config(overrides: list[str], tmp_path: Path) -> None:
    code, stdout, stderr = eyas("plan", QUICKSTART, *overrides, "--tokens", "200000", "--answer-share", "0.5")
    assert code == 0, stderr
    assert "8.03 billion parameters" in stdout
    assert "200,000 in 98 conversations, as told" in stdout
    assert "100,000 tokens, 50 % of all" in stdout
    # 3 * 4096 * 2 of captured states, 4096 * 2 of the teacher at half of the tokens, id and mask.
    assert "28,677 bytes a token" in stdout
    # fp8: 3 * 4096 and 3 scales; half of 4096 and a scale, or of 64 ids and float16 log-probabilities and a tail.
    assert f"fp8: {3 * 4096 + 12 + (4096 + 4) / 2 + 5:,.0f} bytes a token" in stdout
    assert f"top-64 teacher: {3 * 4096 + 12 + (64 * 6 + 4) / 2 + 5:,.0f} bytes a token" in stdout
    assert f"head:           {HEAD_8B / 1e6:.1f} million" in stdout
    assert "name the hardware" in stdout
    assert not (tmp_path / "run").exists()


def test_open_sizes_are_bounds(overrides: list[str]) -> None:
    _, stdout, _ = eyas("plan", QUICKSTART, *overrides, "head.draft_vocab_size=auto", "init.train_lm_head=false")
    assert f"head:           {(HEAD_8B - 8192 * 4096) / 1e6:.1f} million" in stdout
    _, stdout, _ = eyas("plan", QUICKSTART, *overrides, "head.draft_vocab_size=auto")
    assert f"head:           at most {(HEAD_8B + (128256 - 8192) * 4096) / 1e6:.1f} million" in stdout
    assert "not known before the data is here" in stdout


def test_limits_of_the_recipe_bound_what_is_not_known(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ["data.max_train_tokens=3000000", "data.max_heldout=100"]
    code, stdout, _ = eyas("plan", QUICKSTART, *overrides, *limits)
    assert (code, "3,204,800 in 1,565 conversations, at most (data.max_train_tokens" in stdout) == (0, True)
    assert "3,204,800 tokens, 100 % of all" in stdout
    _, stdout, _ = eyas("plan", QUICKSTART, *overrides, *limits, "--answer-share", "0.25")
    assert "801,200 tokens, 25 % of all" in stdout
    assert "share of answers as told" in stdout
    monkeypatch.setattr(plan, "free_bytes", lambda path: (path, 2**30))
    code, stdout, _ = eyas("plan", QUICKSTART, *overrides, *limits)
    assert (code, "1.00 GiB free, which may not be enough" in stdout) == (0, True)
    _, stdout, _ = eyas("plan", QUICKSTART, *overrides, "data.max_train_tokens=5", "data.max_heldout=null")
    assert "not known before the data is here" in stdout


def test_what_is_not_done_is_not_planned(overrides: list[str]) -> None:
    _, stdout, _ = eyas("plan", QUICKSTART, *overrides, "score.head=somewhere")
    assert "stages:         collect, score" in stdout
    assert "train memory" not in stdout
    _, stdout, _ = eyas("plan", QUICKSTART, *overrides, "features.mode=online")
    assert "features disk:  none (features.mode=online)" in stdout
    assert "and the target beside it" in stdout


def test_hours_on_named_hardware(overrides: list[str]) -> None:
    tokens = ["--tokens", "500000000", "--answer-share", "0.5"]
    _, stdout, _ = eyas("plan", QUICKSTART, *overrides, *tokens, "--hardware", "h100", "--devices", "8")
    active = 8_030_261_248 - 2 * 128256 * 4096
    flops = 5e8 * (2 * active + 4 * 32 * 4096 * 2048 / 2)
    seconds = flops / (8 * 989e12 * estimate.EXTRACT_SHARE)
    assert f"extract {seconds / 60:.0f} min" in stdout
    assert "8 x h100" in stdout
    assert "the vendor's figure" in stdout
    code, _, stderr = eyas("plan", QUICKSTART, *overrides, *tokens, "--hardware", "h1000")
    assert (code, "choose one of here, a100-40gb" in stderr) == (2, True)


def fit_of(step: str, *arguments: str) -> str:
    """What a plan says of one step's memory on a small GPU."""
    code, stdout, stderr = eyas("plan", QUICKSTART, *arguments, "--tokens", "1000", "--answer-share", "0.5")
    assert code == 0, stderr
    told = [line.strip() for line in stdout.splitlines() if re.match(rf" +{step}: .* per device", line)]
    return told[0] if told else ""


def test_a_target_that_does_not_fit_is_told_with_what_would(overrides: list[str]) -> None:
    small = [*overrides, "--hardware", "rtx4090", "--devices", "2"]
    wide = [*small, "features.dtype=float32"]
    assert "22.35 GiB there: does NOT fit; with features.device_map=auto 15." in fit_of("extract", *wide)
    assert "extract: 15." in fit_of("extract", *wide, "features.device_map=auto")
    assert fit_of("extract", *small).endswith("fits")
    engine = ["features.backend=vllm", "features.batch_size=16", "features.gpu_memory_utilization=1.0"]
    # Of 16 conversations of 2,048 tokens: 32 layers, 8 heads of 128, keys and values; and four states of 4,096.
    least = 16 * 2048 * (2 * 32 * 8 * 128 * 4 + 4 * 4096 * 4)
    told = fit_of("extract", *wide, *engine)
    assert told.startswith(f"extract: {(8_030_261_248 * 4 + least) / 2**30:.2f} GiB needed per device")
    half = (8_030_261_248 * 4 + 16 * 2048 * 2 * 32 * 8 * 128 * 4) / 2 + 16 * 2048 * 4 * 4096 * 4
    assert told.endswith(f"with features.tensor_parallel_size=2 {half / 2**30:.2f} GiB would")
    assert fit_of("extract", *wide, *engine, "features.tensor_parallel_size=2").endswith("fits on each of 2 devices")
    assert fit_of("extract", *small, "features.mode=online") == ""


def test_what_vllm_may_take_of_a_device_decides(overrides: list[str]) -> None:
    small = [*overrides, "--hardware", "rtx4090", "features.backend=vllm", "features.batch_size=16"]
    needed = 2 * 8_030_261_248 + 16 * 2048 * (2 * 32 * 8 * 128 * 2 + 4 * 4096 * 2)  # 21.0 of 24 GB
    told = fit_of("extract", *small)
    assert told.startswith(
        f"extract: {needed / 2**30:.2f} GiB needed per device and {0.85 * 24e9 / 2**30:.2f} GiB there"
    )
    assert fit_of("extract", *small, "features.gpu_memory_utilization=0.95").endswith("fits")
    score = [*overrides, "--hardware", "rtx4090", "score.batch_sizes=[1]"]
    assert "20.56 GiB per device: fits" in fit_of("score", *score), "vLLM's own share"
    beside = [*score, "score.protocol=side-by-side"]
    assert "10.28 GiB there" in fit_of("score", *beside), "two engines at a time share it"


@pytest.mark.engine
def test_vllms_own_share_of_memory_is_that_of_the_version_installed() -> None:
    found = find_spec("vllm")
    assert found is not None and found.origin is not None
    text = (Path(found.origin).parent / "config" / "cache.py").read_text(encoding="utf-8")
    assert f"gpu_memory_utilization: float = Field(default={VLLM_SHARE}," in text


def test_an_engine_does_not_take_more_devices_than_there_are(overrides: list[str]) -> None:
    h100 = [*overrides, "--hardware", "h100", "features.backend=vllm", "features.tensor_parallel_size=8"]
    told = fit_of("extract", *h100)
    assert "on 8 devices together where there is 1: does NOT fit; with features.tensor_parallel_size=1 " in told
    both = fit_of("extract", *h100, "features.dtype=float32", "features.batch_size=256", "data.max_length=4096")
    assert "with features.batch_size=16 features.tensor_parallel_size=1 " in both
    small = [*overrides, "--hardware", "rtx4090", "score.batch_sizes=[16]", "score.max_model_len=4096"]
    assert "does NOT fit; on 2 devices with score.tensor_parallel_size=2 " in fit_of("score", *small)
    assert "does NOT fit; with score.tensor_parallel_size=2 " in fit_of("score", *small, "--devices", "2")
    two = fit_of("score", *small, "--devices", "2", "score.tensor_parallel_size=4")
    assert "on 4 devices together where there are 2: does NOT fit; with score.tensor_parallel_size=2 " in two


def test_training_and_serving_that_do_not_fit_are_told_with_what_would(overrides: list[str]) -> None:
    small = [*overrides, "--hardware", "rtx4090"]
    large = ["train.batch_tokens=65536", "train.ttt_steps=4"]
    told = fit_of("train", *small, *large)
    assert "does NOT fit; with train.pack_tokens=" in told
    size = int(told.partition("train.pack_tokens=")[2].split()[0])
    assert fit_of("train", *small, *large, f"train.pack_tokens={size}").endswith("fits")
    assert "does NOT fit" in fit_of("train", *small, *large, f"train.pack_tokens={2 * size}")
    beside = fit_of("train", *small, "features.mode=online", "features.dtype=float32")
    assert "with features.where=process" in beside
    answers = [*small, "--devices", "2", "features.dtype=float32", "data.regenerate=true"]
    answers += ["data.generation.max_model_len=4096"]
    told = fit_of("regenerate", *answers)
    needed = 8_030_261_248 * 4 + 4096 * 2 * 32 * 8 * 128 * 4
    assert told.startswith(f"regenerate: {needed / 2**30:.2f} GiB needed")
    assert told.endswith(f"with data.generation.tensor_parallel_size=2 {needed / 2 / 2**30:.2f} GiB would")
    assert fit_of("regenerate", *answers, "data.generation.servers.urls=[http://a/v1]") == ""
    hopeless = fit_of("score", *small, "score.batch_sizes=[4096]", "score.max_model_len=4096")
    assert hopeless.endswith("no setting here mends it; it would on no device known here")


def test_the_engines_that_are_compared_in_a_wider_type_are_counted(overrides: list[str]) -> None:
    """Weights and head in float32, and one request's keys and values."""
    small = [*overrides, "--hardware", "rtx4090", "score.max_model_len=1024", "score.draft_lengths=[3]"]
    name = r"score, in float32 \(score.lossless\)"
    told = fit_of(name, *small, "score.lossless.dtype=float32", "score.dtype=bfloat16")
    needed = 4 * (8_030_261_248 + HEAD_8B) + 1024 * 2 * 32 * 8 * 128 * 4
    assert f"{needed / 2**30:.2f} GiB needed" in told
    assert fit_of(name, *small, "score.lossless.dtype=float32", "score.lossless.requests=0") == ""
    assert fit_of(name, *small, "score.lossless.dtype=bfloat16", "score.dtype=bfloat16") == ""


def test_a_measurement_alone_is_held_against_the_memory_too(overrides: list[str], tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "model.safetensors").write_bytes(b"0" * 2**20)
    alone = [*overrides, f"score.head={head}", "--hardware", "rtx4090"]
    arguments = [*alone, "score.batch_sizes=[2]", "score.max_model_len=4096", "score.dtype=bfloat16"]
    needed = 2 * 8_030_261_248 + 2 * 4096 * 2 * 32 * 8 * 128 * 2 + 2**20
    _, stdout, _ = eyas("plan", QUICKSTART, *arguments)
    assert f"score memory:   about {needed / 2**30:.2f} GiB per GPU" in stdout
    assert f"score: {needed / 2**30:.2f} GiB of 20.56 GiB per device: fits" in stdout
    assert "train memory" not in stdout


def test_a_known_target_is_planned_without_the_hub(tmp_path: Path) -> None:
    arguments = [f"run_dir={tmp_path}", "target.model=openai/gpt-oss-20b", "features.dtype=bfloat16"]
    code, stdout, stderr = eyas("plan", QUICKSTART, *arguments)
    assert code == 0, stderr
    assert "20.9 billion parameters, 38.96 GiB in bfloat16, 12.8" in stdout
    told = next(line for line in stdout.splitlines() if "a copy of its config comes with eyas" in line)
    assert "a run needs the model itself. target.model: HF_HUB_OFFLINE is set, and the cache" in told
    code, _, stderr = eyas("plan", QUICKSTART, *arguments, "target.revision=main")
    assert (code, "HF_HUB_OFFLINE is set" in stderr) == (2, True)
    code, _, stderr = eyas("prepare", QUICKSTART, *arguments)
    assert (code, "target.model: HF_HUB_OFFLINE is set" in stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "5"], "give --answer-share as well"),
        (["--tokens", "0", "--answer-share", "0.5"], "at least 1"),
        (["--tokens", "5", "--answer-share", "1.5"], "above 0 and at most 1"),
    ],
)
def test_bad_options_are_refused(overrides: list[str], arguments: list[str], message: str) -> None:
    code, _, stderr = eyas("plan", QUICKSTART, *overrides, *arguments)
    assert code == 2
    assert message in stderr


def test_a_small_disk_refuses_the_run(overrides: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokens = ["--tokens", "1000000000", "--answer-share", "0.5"]
    monkeypatch.setattr(plan, "free_bytes", lambda _path: (tmp_path, 10 * 2**40))
    assert eyas("plan", QUICKSTART, *overrides, *tokens)[0] == 2
    code, stdout, stderr = eyas("plan", QUICKSTART, *overrides, *tokens, "features.storage=fp8")
    assert code == 2, "14 TB"
    assert "features disk:" in stdout
    assert "features.storage=fp8, features.teacher=top-k, features.mode=online" in stderr
    monkeypatch.setattr(plan, "free_bytes", lambda _path: (tmp_path, 20 * 2**40))
    assert eyas("plan", QUICKSTART, *overrides, *tokens, "features.storage=fp8")[0] == 0


def test_local_files_are_sampled(tmp_path: Path) -> None:
    """The sample is the whole of a small file, so the estimate is what the prepare stage then counts."""
    chats = tiny.write_conversation_file(tmp_path / "chats.jsonl", train=30, heldout=4)
    target = tiny.write_target(tmp_path / "target")
    overrides = [f"target.model={target}", f"data.conversations={chats}", f"run_dir={tmp_path / 'run'}"]
    overrides += ["features.capture_layers=[1,2,3]", "data.max_length=64", "head.draft_vocab_size=64"]
    code, stdout, stderr = eyas("plan", QUICKSTART, *overrides)
    assert code == 0, stderr
    sampled = next(line for line in stdout.splitlines() if line.startswith("tokens:"))
    assert "in 34 conversations, estimated from samples of the local files" in sampled
    code, _, stderr = eyas("prepare", QUICKSTART, *overrides, "data.max_length=513")
    assert code == 2
    assert "513 tokens are more than the 512 positions of the target" in stderr
    code, _, stderr = eyas("prepare", QUICKSTART, *overrides)
    assert code == 0, stderr
    counted = next(line for line in eyas("plan", QUICKSTART, *overrides)[1].splitlines() if line.startswith("tokens:"))
    assert counted.endswith("counted by the prepare stage")
    assert counted.split()[1] == sampled.split()[1]


def test_here_is_measured() -> None:
    here = find_hardware("here", dtype="float32")
    assert here.measured
    assert 1e9 < here.flops < 1e16
    assert 1e8 < here.bandwidth < 1e14
    assert shutil.disk_usage("/").total > 0 < here.memory


SIZE = TargetSize(
    hidden_size=10,
    vocab_size=100,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=5,
    parameters=5000,
    active_parameters=3000,
    weight_bytes=10_000,
    packed_parameters=0,
)


def test_training_counts_what_gathering_leaves() -> None:
    tokens = Tokens(total=1000, answers=400)
    head = HeadSize(slots=300, rows=700, readout=0)
    flops = estimate.training_flops(tokens, head=head, target=SIZE, draft_vocab=50, epochs=2, mean_steps=3.0)
    assert flops == 2 * (1000 * 6 * 300 + 400 * (3 * 6 * (700 + 500) + 2 * 500))


def answering(tokens: Tokens, **changes: Any) -> float:
    settings = {"target": SIZE, "dtype": "bfloat16", "mean_length": 100.0, "batch_size": 1, "devices": 1}
    settings |= {"hardware": NAMED["h100"], "memory_share": 0.5}
    return estimate.generation_seconds(tokens, **{**settings, **changes})


def test_a_step_of_decoding_reads_weights_and_keys_and_values() -> None:
    """Of SIZE: 2 x 2 layers x 1 head x 5 of two bytes a token; an answer of 100 tokens is 50 long on average."""
    hardware = NAMED["h100"]
    everything = Tokens(total=1000, answers=1000)
    rate = hardware.bandwidth * 0.5
    assert answering(everything) == pytest.approx(1000 * (10_000 + 50 * 40) / rate)
    eight = 1000 / 8 * (10_000 + 8 * 50 * 40) / rate
    assert answering(everything, batch_size=8) == pytest.approx(eight)
    assert answering(everything, batch_size=8, devices=2) == pytest.approx(eight / 2)


def test_no_more_is_decoded_at_a_time_than_the_cache_holds() -> None:
    few = replace(NAMED["h100"], memory=2 * (10_000 + 3.5 * 50 * 40))
    everything = Tokens(total=1000, answers=1000)
    held = answering(everything, batch_size=256, hardware=few)
    assert held == pytest.approx(answering(everything, batch_size=3))


def test_large_batches_of_short_answers_are_bound_by_arithmetic_and_prompts_are_read_once() -> None:
    hardware = replace(NAMED["h100"], bandwidth=1e18)
    tokens = Tokens(total=1000, answers=600)
    answers = 600 * 2 * 3000 / (hardware.flops * 0.5)
    prompts = 400 * 2 * 3000 / (hardware.flops * 0.5)
    assert answering(tokens, hardware=hardware, batch_size=100_000) == pytest.approx(answers + prompts)


def llama_hours(overrides: list[str], *more: str) -> str:
    tokens = ["--tokens", "100000000", "--answer-share", "0.5", "--hardware", "h100"]
    return eyas("plan", QUICKSTART, *overrides, "data.regenerate=true", *tokens, *more)[1]


def test_a_plan_says_what_its_hours_divide_by(overrides: list[str]) -> None:
    batch = ["data.generation.batch_size=64"]
    one, eight = llama_hours(overrides, *batch), llama_hours(overrides, *batch, "--devices", "8")
    # 64 sequences of 2,048 x 0.75 tokens, of 131,072 bytes each, beside the weights, at half of 3.35 TB/s.
    step = (2 * 8_030_261_248 + 64 * 1536 * 131_072) / (3.35e12 / 2)
    active = 8_030_261_248 - 2 * 128256 * 4096
    hours = (5e7 / 64 * step + 5e7 * 2 * active / (989e12 / 2)) / 3600
    assert f"time:           regenerate {hours:.1f} h" in one
    assert f"time:           regenerate {hours / 8 * 60:.0f} min" in eight
    assert "side by side" not in one
    assert f"8 engines answer (data.generation.servers.urls; one takes {hours:.1f} h)" in eight
    assert "8 tasks extract (--part or --extract-tasks 8; one takes " in eight
    paired = llama_hours(overrides, *batch, "--devices", "8", "data.generation.tensor_parallel_size=2")
    assert "4 engines answer" in paired


def test_servers_answer_as_many_at_a_time_as_they_are_asked(overrides: list[str]) -> None:
    servers = ["--devices", "8", "data.generation.servers.urls=[http://a/v1,http://b/v1]"]
    few = llama_hours(overrides, *servers, "data.generation.servers.concurrency=64")
    alone = llama_hours(overrides, "data.generation.batch_size=64")
    hours = float(alone.partition("regenerate ")[2].partition(" h")[0])
    assert f"2 engines answer (data.generation.servers.urls; one takes {hours:.1f} h)" in few
    many = llama_hours(overrides, *servers, "data.generation.servers.concurrency=128")
    assert few != many
