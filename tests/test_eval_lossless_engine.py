"""The whole losslessness ladder on a real engine, and with a fault of the engine that it must find."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.eval.arms import PLAIN, Arm
from eyas.eval.launch import Launcher
from eyas.eval.lossless.ladder import (
    lossless_outcome,
)
from eyas.eval.lossless.results import LEVELS, lossless_results
from eyas.eval.lossless.run import run_lossless
from eyas.eval.lossless.stored import STARTS
from eyas.eval.workload import Request
from eyas.heads.formats.write import write_head
from eyas.heads.serving import engine_environment, speculative_config
from tests import tiny
from tests.eval_ladder import base_plan

UNMENDED = """
import sys
import eyas.eval.lossless.mend as mend
mend.mend_cpu_sampler = lambda: []
from eyas.eval.engine import main
sys.argv[0] = "engine"
main()
"""


def write_random_head(directory: Path) -> Path:
    """A head that fits the tiny target and drafts at random."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = tiny.head_config(**sizes, vocab_size=tiny.VOCAB_SIZE, draft_vocab_size=128, capture_layers=(2, 3, 4))
    write_head(directory, tiny.random_head(config), dtype=torch.float32)
    return directory


@pytest.mark.engine
def test_the_ladder_on_a_real_engine(tmp_path: Path, tiny_target: Path) -> None:
    """A random head on a random target: its drafts are bad, and nothing of that may show in any answer.

    The schedule drafts for one and two requests only: it is checked where it drafts, not in a batch of four.
    """
    config = speculative_config(write_random_head(tmp_path / "head"), method="eagle3", num_speculative_tokens=2)
    small = {**config, "num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 4, 0]]}
    arms = [PLAIN, Arm("k2", "head", config), Arm("schedule", "schedule", small)]
    generator = random.Random(0)
    asked = [
        Request("heldout", f"p{index}", [generator.randrange(3, tiny.VOCAB_SIZE) for _ in range(6 + index)])
        for index in range(4)
    ]
    directory = tmp_path / "lossless"
    launcher = Launcher(engine_environment(threads=1, kv_cache_gib=1), 300, lambda _: None)

    def run(launcher: Launcher, arms: list[Arm]) -> dict[str, Any]:
        run_lossless(
            directory,
            plan=base_plan(str(tiny_target)),
            arms=arms,
            prompts=asked,
            requests=4,
            max_tokens=12,
            dtype="float32",
            samples=400,
            launcher=launcher,
            predict=None,
            rounds=5000,
        )
        failures = [path.read_text() for path in directory.rglob("*.failed.json")]
        assert not failures, failures
        return lossless_results(directory, session="s")["lossless"]

    lossless = run(launcher, arms)
    assert lossless["passed"] is True, {level: lossless[level] for level in LEVELS if not lossless[level]["passed"]}
    assert lossless["L1"]["arms"][0]["requests"] == 4
    for level in LEVELS[1:]:
        for found in lossless[level]["arms"]:
            assert found["drafted_tokens"] > found["answers"], (level, found["arm"])
            assert found["batch_size"] == (1 if level == "L2" else 2 if found["arm"] == "schedule" else 4)
    assert lossless["L3"]["samples"] == 400
    first = lossless["L3"]["arms"][0]["tests"][0]
    assert first["samples"] == [800, 400]
    assert first["degrees"] > 0
    if not lossless["mends"]:
        return
    # The fault that was mended is a wrong sampler inside a real engine: L3 must see it in the answers, and L1 must not.
    for path in (directory / STARTS).glob("002-k2.*"):
        path.unlink()
    broken = run(replace(launcher, command=(sys.executable, "-c", UNMENDED)), arms[:2])
    assert broken["mends"] == []
    assert broken["L3"]["null"]["passed"]
    assert broken["L3"]["passed"] is False
    assert lossless_outcome(broken, arm="k2", temperature=1.0) is False
    assert lossless_outcome(broken, arm="k2", temperature=0.0) is True
