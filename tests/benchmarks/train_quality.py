"""Heads that were trained for the same number of seconds on the same features: ours and speculators 0.9's.

Both see the documents of a run's store in the same kind of order, until the clock ends; only steps count, not loading.
Every schedule is a function of the share of time that has passed, so each ends with the time.

    ours          the recipe's head, start, losses, optimiser and schedule; batches of its `batch_tokens`
    speculators   the defaults of its trainer: one Llama layer with norm_before_residual, norm_before_fc and norm_output, KL
                  over 3 steps that count the same, Muon and AdamW at 1e-3, 1 % warm-up and linear decay, clip at 1.0. Its
                  lm_head is the target's and frozen, its layer and fc start at random, as it ships. Packs of 512 tokens
                  by its collation. Full attention, which at 512 tokens is what its window of 2048 is. It is given our
                  draft vocabulary, whose unused places are filled better than by its own choice.

The last head of each counts: neither chooses among checkpoints. Then held-out tau of both is computed from the features of
all held-out documents, and both are served by vLLM on held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.heads.files import read_json, write_json
from eyas.heads.formats.read import read_head
from eyas.heads.head import DraftHead
from eyas.train.heldout import heldout_statistics
from tests.benchmarks.train_served import served_tau
from tests.benchmarks.train_timed import Given, given, train_ours, train_peer

ARMS = ("ours", "speculators")
CHAIN_LENGTHS = (3, 5)


def compare_quality(arguments: argparse.Namespace) -> None:
    """Train both, each in a process of its own, then compare them; one JSON result."""
    torch.set_num_threads(arguments.threads)
    if arguments.arm_process is not None:
        train = {"ours": train_ours, "speculators": train_peer}[arguments.arm_process]
        print(json.dumps(train(given(arguments), arguments)))
        return
    if arguments.run is None or arguments.out is None:
        raise SystemExit("--quality needs --run RUN_DIR, with its stages prepare and features, and --out DIR")
    arguments.out.mkdir(parents=True, exist_ok=True)
    arms: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        command = [sys.executable, "-m", "tests.benchmarks.train", *sys.argv[1:], "--arm-process", arm]
        done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
        arms[arm] = json.loads(done.stdout.splitlines()[-1])
        print(f"{arm}: {json.dumps(arms[arm])}", flush=True)
    there = given(arguments)
    for arm, taus in heldout_taus(there, arguments.out).items():
        arms[arm]["heldout_tau"] = taus
    if arguments.prompts:
        for arm, taus in _served(there, arguments).items():
            arms[arm]["served_tau"] = taus
    result = {"seconds": arguments.seconds, "threads": arguments.threads, "recipe": arguments.recipe, **arms}
    result["ratio"] = ratios(arms["ours"], arms["speculators"])
    write_json(arguments.out / "quality.json", result)
    print(json.dumps(result, indent=1))


def ratios(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Our tau over the peer's, by kind of tau and drafted tokens."""
    kinds = [name for name in ("heldout_tau", "served_tau") if name in ours]
    return {name: {length: ours[name][length] / peer[name][length] for length in ours[name]} for name in kinds}


def _served(there: Given, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    count = min(arguments.prompts, len(there.heldout))
    return served_tau(
        {arm: arguments.out / arm / "head" for arm in ARMS},
        target_dir=there.run.target_dir,
        documents=there.heldout.load(range(count)),
        stop_token_ids=read_json(there.run.directory("prepare") / "stop_tokens.json"),
        chain_lengths=CHAIN_LENGTHS,
        directory=arguments.out / "served",
        threads=arguments.threads,
    )


def heldout_taus(there: Given, out_dir: Path) -> dict[str, dict[str, float]]:
    """Held-out tau of both heads on all held-out documents, by drafted tokens."""
    return {arm: _heldout_tau(there, out_dir / arm / "head") for arm in ARMS}


def _heldout_tau(there: Given, head_dir: Path) -> dict[str, float]:
    head: DraftHead = read_head(head_dir, target_config=there.target)
    readout_DH: Tensor = there.pieces.readout_VH[head.draft_to_target_D].float()
    documents = there.heldout.load(range(len(there.heldout)))
    return {
        str(length): heldout_statistics(
            head,
            documents,
            embedding_VH=there.pieces.embedding_VH.float(),
            target_readout_DH=readout_DH,
            num_tokens=length,
            device=torch.device("cpu"),
            autocast=None,
        ).tau
        for length in CHAIN_LENGTHS
    }
