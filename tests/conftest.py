"""Set-up that every test shares: no network, few threads, and the same hypothesis examples on every run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import hypothesis
import pytest

# No deadline: a loaded machine is no failure.
hypothesis.settings.register_profile("eyas", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("eyas")

# A shell without job control starts background jobs with SIGINT ignored, and tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Of two processes of tests each has a core.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("NO_COLOR", "1")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random Llama with tokenizer and chat template; treat it as read-only."""
    from tests import tiny

    return tiny.write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def full_session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Score directory of a made-up session in which everything was measured, with its report; treat it as read-only."""
    from eyas.eval.report.build import build_report
    from tests.eval_full_session import write_full_session

    score_dir = tmp_path_factory.mktemp("full-session")
    write_full_session(score_dir)
    build_report(score_dir)
    return score_dir
