"""What each way of storing features costs: bytes per token, and the held-out tau of a head trained on them.

    eyas run RECIPE --until prepare                       (or a whole run: a store that is there is used)
    python -m tests.benchmarks.storage RECIPE [SECTION.FIELD=VALUE ...] --out DIR [--seeds 0 1 2]

The target runs at most once, in its recipe's type (float32 or bfloat16, DIR/source). Every form is made from those states
and trained on with the recipe's settings and the same seed. `tau` is what the run itself reports, on held-out features in
its own form; `tau_exact` is the same head on the source's, as a server would feed it. A line of DIR/results.jsonl is one
form and seed; lines that are there are not measured again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.heads.config import load_target_config
from eyas.heads.files import write_json
from eyas.heads.formats.read import read_head
from eyas.heads.slots import teacher_positions
from eyas.heads.target import load_target_pieces
from eyas.recipes.hardware import nominal_flops
from eyas.recipes.load import load_recipe
from eyas.recipes.run import Run, available_cores, open_run
from eyas.recipes.train_stages import captured_layers, head_plan, loop_settings, loss_terms, optimization
from eyas.train.data.prepare import SPLITS
from eyas.train.data.tokens import Tokens
from eyas.train.features.documents import Document
from eyas.train.features.encoding import DocumentEncoder, StoreForm
from eyas.train.features.extract import extract
from eyas.train.features.identity import INDEX_NAME, open_index
from eyas.train.features.shards import ShardWriter, shard_name, shard_plan
from eyas.train.features.store import FeatureStore
from eyas.train.features.teacher import HiddenTeacher
from eyas.train.heldout import heldout_statistics
from eyas.train.inputs import Offline, TrainedInputs
from eyas.train.run import run_training
from eyas.train.tracking import TrackingSettings

FORMS = {
    "bfloat16, last state everywhere": StoreForm(
        storage="bfloat16", teacher="hidden", teacher_k=0, last_everywhere=True
    ),
    "bfloat16": StoreForm(storage="bfloat16", teacher="hidden", teacher_k=0, last_everywhere=False),
    "fp8": StoreForm(storage="fp8", teacher="hidden", teacher_k=0, last_everywhere=False),
    "fp8, top-64 teacher": StoreForm(storage="fp8", teacher="top-k", teacher_k=64, last_everywhere=False),
}
"""The first is the plain form that the others are compared with."""
SHARD_TOKENS = 30_000


def main() -> None:
    """Parse the command line, measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", help="of training; the recipe's when left out")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    arguments = parser.parse_args()
    run = open_run(load_recipe(arguments.recipe, overrides=arguments.overrides))
    if run.recipe.head.kind == "eagle":
        raise SystemExit("an EAGLE head reads the last state everywhere, so there is nothing to compare")
    source = find_source(run, out_dir=arguments.out)
    results = arguments.out / "results.jsonl"
    for seed in arguments.seeds or [run.recipe.seed]:
        for name in arguments.forms:
            if not any((line["form"], line["seed"]) == (name, seed) for line in read_results(results)):
                line = measure(run, name, source=source, out_dir=arguments.out, seed=seed)
                with results.open("a") as stream:
                    stream.write(json.dumps(line) + "\n")
    print_table(read_results(results))


def find_source(run: Run, *, out_dir: Path) -> Path:
    """A store with hidden teachers in float32 or bfloat16: the run's own, or one that is extracted now."""
    own = run.directory("extract")
    if (own / INDEX_NAME).is_file():
        form = FeatureStore(own, split="train").identity.form
        if form.teacher == "hidden" and form.storage in ("float32", "bfloat16"):
            return own
    features = run.recipe.features
    assert features.dtype != "float16", "float16 states are not what the others are rounded from"
    extract(
        out_dir / "source",
        tokens_dir=run.directory("prepare"),
        target_dir=run.target_dir,
        capture_layers=captured_layers(run),
        dtype=features.dtype,
        form=StoreForm(storage=features.dtype, teacher="hidden", teacher_k=0, last_everywhere=False),
        batch_tokens=features.batch_tokens,
        threads=features.threads or available_cores(),
        device_map=features.device_map,
        trust_remote_code=run.recipe.target.trust_remote_code,
        generated_states=None,
    )
    return out_dir / "source"


def reencode(source: Path, store: Path, *, form: StoreForm, readout_VH: Tensor) -> None:
    """Write the documents of a store in another form."""
    shutil.rmtree(store, ignore_errors=True)
    there = {split: FeatureStore(source, split=split) for split in SPLITS}
    made = replace(there["train"].identity, form=form)
    open_index(store, made, documents={split: len(there[split]) for split in SPLITS})
    encoder = DocumentEncoder(form, num_layers=len(made.capture_layers), readout_VH=readout_VH)
    for split, documents in there.items():
        writer = ShardWriter(store, identity=made, split=split)
        for chosen in shard_plan(documents.lengths, shard_tokens=SHARD_TOKENS):
            rows = []
            for index, document in zip(chosen, documents.load(chosen), strict=True):
                fields = {
                    "answer_mask_T": document.answer_mask_T,
                    "captured_TX": document.captured_TX,
                    "last_TH": last_states(document),
                }
                rows.append((index, encoder.encode(document.token_ids_T, name=str(index), **fields)))
            writer.write(shard_name(chosen), rows)


def last_states(document: Document) -> Tensor:
    """Last states [T, H]; zero where the source did not keep them, which no head that is trained here reads."""
    if document.last_TH is not None:
        return document.last_TH
    assert isinstance(document.teacher, HiddenTeacher)
    hidden_PH = document.teacher.hidden_PH
    last_TH = hidden_PH.new_zeros((document.token_ids_T.shape[0], hidden_PH.shape[1]))
    last_TH[teacher_positions(document.answer_mask_T)] = hidden_PH
    return last_TH


def measure(run: Run, name: str, *, source: Path, out_dir: Path, seed: int) -> dict[str, Any]:
    """Make a form's store, train the recipe's head on it, and say what both came to."""
    recipe, train = run.recipe, run.recipe.train
    store, head_dir = out_dir / "store", out_dir / f"train-{list(FORMS).index(name)}-{seed}"
    pieces = load_target_pieces(run.target_dir)
    reencode(source, store, form=FORMS[name], readout_VH=pieces.readout_VH)
    counts = run_training(
        head_dir,
        inputs=TrainedInputs(
            target_dir=run.target_dir, tokens_dir=run.directory("prepare"), features=Offline(features_dir=store)
        ),
        plan=head_plan(recipe),
        losses=loss_terms(train),
        loop=loop_settings(train, seed=seed),
        optimization=optimization(train),
        precision=train.precision,
        threads=train.threads or available_cores(),
        tracking=TrackingSettings(name=recipe.name, config={}),
        settings={},
        facts={},
        nominal_flops=nominal_flops,
        trust_remote_code=recipe.target.trust_remote_code,
        say=print,
    )
    tokens = sum(int(Tokens(run.directory("prepare"), split=split).lengths.sum()) for split in SPLITS)
    stored = sum(path.stat().st_size for path in store.glob("*.safetensors"))
    shutil.rmtree(store)
    line = {
        "form": name,
        "seed": seed,
        "tokens": tokens,
        "bytes": stored,
        "bytes_per_token": stored / tokens,
        "tau": counts["heldout_tau"],
        "tau_exact": exact_tau(run, head_dir / "head", source=source),
        "steps": counts["steps"],
        "recipe": recipe.name,
    }
    write_json(head_dir / "storage.json", line)
    return line


def exact_tau(run: Run, head_dir: Path, *, source: Path) -> float:
    """Held-out tau of a head on the source's features."""
    pieces = load_target_pieces(run.target_dir)
    config = load_target_config(run.target_dir, trust_remote_code=run.recipe.target.trust_remote_code)
    head = read_head(head_dir, target_config=config)
    heldout = FeatureStore(source, split="heldout")
    return heldout_statistics(
        head,
        (heldout[index] for index in range(len(heldout))),
        embedding_VH=pieces.embedding_VH.float(),
        target_readout_DH=pieces.readout_VH[head.draft_to_target_D].float(),
        num_tokens=run.recipe.train.chain_length,
        device=torch.device("cpu"),
        autocast=None,
    ).tau


def read_results(path: Path) -> list[dict[str, Any]]:
    """Lines that are there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def print_table(lines: list[dict[str, Any]]) -> None:
    """Means over the seeds of each form, beside the plain form."""
    print(f"{'form':34} {'bytes/token':>11} {'of plain':>8} {'tau':>7} {'tau exact':>9} {'of plain':>8}  seeds")
    rows = list(_rows(lines))
    for name, size, tau, exact, seeds in rows:
        _, plain_size, _, plain_exact, _ = rows[0]
        share, change = size / plain_size, exact / plain_exact - 1
        print(f"{name:34} {size:11.0f} {share:8.3f} {tau:7.4f} {exact:9.4f} {change:+8.2%}  {seeds}")


def _rows(lines: list[dict[str, Any]]) -> Iterator[tuple[str, float, float, float, int]]:
    for name in FORMS:
        own = [line for line in lines if line["form"] == name]
        if own:
            size, tau, exact = (
                sum(line[key] for line in own) / len(own) for key in ("bytes_per_token", "tau", "tau_exact")
            )
            yield name, size, tau, exact, len(own)


if __name__ == "__main__":
    main()
