"""`eyas plan`: arithmetic from configs alone, held against figures worked out by hand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.recipes import estimate, plan
from eyas.recipes.cli import app
from eyas.recipes.estimate import HeadSize, Tokens
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
    assert dense.weight_bytes == dense.served_bytes == 2 * dense.parameters
    sparse = read_target_size(QWEN3_30B, dtype="bfloat16", trust_remote_code=False)
    assert sparse.parameters == pytest.approx(30.5e9, rel=0.01)
    # "3.3B activated" of the model card counts embedding and lm_head.
    assert sparse.active_parameters + 2 * 151936 * 2048 == pytest.approx(3.3e9, rel=0.03)


@pytest.mark.parametrize(("target", "gibibytes"), [(GPT_OSS_120B, 60.8), (GPT_OSS_20B, 12.8)])
def test_weights_in_mxfp4_take_what_the_published_files_take(target: Path, gibibytes: float) -> None:
    size = read_target_size(target, dtype="bfloat16", trust_remote_code=False)
    assert size.served_bytes / 2**30 == pytest.approx(gibibytes, rel=0.005)  # arXiv 2508.10925, table 1
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
    engine = ["features.backend=vllm", "features.batch_size=16"]
    # Of 16 conversations of 2,048 tokens: 32 layers, 8 heads of 128, keys and values; and four states of 4,096.
    least = 16 * 2048 * (2 * 32 * 8 * 128 * 4 + 4 * 4096 * 4)
    told = fit_of("extract", *wide, *engine)
    assert told.startswith(f"extract: {(8_030_261_248 * 4 + least) / 2**30:.2f} GiB needed per device")
    half = (8_030_261_248 * 4 + 16 * 2048 * 2 * 32 * 8 * 128 * 4) / 2 + 16 * 2048 * 4 * 4096 * 4
    assert told.endswith(f"with features.tensor_parallel_size=2 {half / 2**30:.2f} GiB would")
    assert fit_of("extract", *wide, *engine, "features.tensor_parallel_size=2").endswith("fits")
    assert fit_of("extract", *small, "features.mode=online") == ""


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
    assert "with score.tensor_parallel_size=2" in fit_of("score", *small, "score.max_model_len=4096")
    answers = [*small, "features.dtype=float32", "data.regenerate=true", "data.generation.max_model_len=4096"]
    told = fit_of("regenerate", *answers)
    needed = 8_030_261_248 * 4 + 4096 * 2 * 32 * 8 * 128 * 4
    assert told.startswith(f"regenerate: {needed / 2**30:.2f} GiB needed")
    assert told.endswith(f"with data.generation.tensor_parallel_size=2 {needed / 2 / 2**30:.2f} GiB would")
    assert fit_of("regenerate", *answers, "data.generation.servers.urls=[http://a/v1]") == ""
    hopeless = fit_of("score", *small, "score.batch_sizes=[4096]", "score.max_model_len=4096")
    assert hopeless.endswith("no setting here mends it; it would on no device known here")


def test_a_known_target_is_planned_without_the_hub(tmp_path: Path) -> None:
    arguments = [f"run_dir={tmp_path}", "target.model=openai/gpt-oss-20b", "features.dtype=bfloat16"]
    code, stdout, stderr = eyas("plan", QUICKSTART, *arguments)
    assert code == 0, stderr
    assert "20.9 billion parameters, 38.96 GiB in bfloat16, 12.8" in stdout
    assert "its config comes with eyas, because the hub did not give it" in stdout
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
    served_bytes=10_000,
)


def test_training_counts_what_gathering_leaves() -> None:
    tokens = Tokens(total=1000, answers=400)
    head = HeadSize(slots=300, rows=700, readout=0)
    flops = estimate.training_flops(tokens, head=head, target=SIZE, draft_vocab=50, epochs=2, mean_steps=3.0)
    assert flops == 2 * (1000 * 6 * 300 + 400 * (3 * 6 * (700 + 500) + 2 * 500))


def test_decoding_is_bound_by_memory_in_small_batches() -> None:
    hardware = NAMED["h100"]
    one = estimate.generation_seconds(1000, target=SIZE, hardware=hardware, devices=1, batch_size=1)
    assert one == pytest.approx(1000 * 10_000 / (hardware.bandwidth * 0.5))
    many = estimate.generation_seconds(1000, target=SIZE, hardware=hardware, devices=2, batch_size=100_000)
    assert many == pytest.approx(1000 * 2 * 3000 / (hardware.flops * 0.5) / 2)
