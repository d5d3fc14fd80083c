"""The text of `eyas plan`: which stages a run would do, and what it will take in disk, memory, FLOPs and time."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.recipes import estimate
from eyas.recipes.disk import free_bytes
from eyas.recipes.estimate_tokens import TokenEstimate, estimate_tokens
from eyas.recipes.fitting import fit_line, steps_of
from eyas.recipes.hardware import Hardware, gib
from eyas.recipes.packaged_targets import is_packaged
from eyas.recipes.plan_facts import PlanFacts
from eyas.recipes.run import Run, plan_run, stage_names
from eyas.recipes.schema import Recipe
from eyas.recipes.stage import MANIFEST
from eyas.recipes.store_form import FORMS, store_form
from eyas.recipes.target_size import TargetSize, read_target_size

INDENT = " " * 16


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the command line adds to a recipe: hardware to estimate times for, and tokens when no file tells them."""

    hardware: Hardware | None = None
    devices: int = 1
    tokens: int | None = None
    answer_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The text, and why the run cannot be done here, if it cannot."""

    lines: list[str]
    refusal: str | None


def make_plan(recipe: Recipe, *, options: PlanOptions) -> Plan:
    """What `eyas run` would do with `recipe`, from configs and local files.

    Of a hub target only its config and tokenizer are fetched; a package target is unpacked.

    Raises:
        ValueError: bad options, or a target that cannot be sized.
    """
    run = plan_run(recipe)
    names = stage_names(recipe, last="score")
    size = read_target_size(
        run.target_dir, dtype=recipe.features.dtype, trust_remote_code=recipe.target.trust_remote_code
    )
    lines = [
        f"run directory:  {run.run_dir}",
        *_target_lines(run, size),
        f"stages:         {', '.join(_stage_word(run, name) for name in names)}",
    ]
    refusal = None
    if "train" in names:
        found = estimate_tokens(run, tokens=options.tokens, answer_share=options.answer_share)
        facts = PlanFacts(run=run, size=size, found=found)
        refusal = _refusal(facts)
        lines += [*_token_lines(found), *_store_lines(facts), *_memory_lines(facts, devices=options.devices)]
        lines += _time_lines(facts, options=options)
    else:
        head = recipe.score.head if recipe.score.draft_lengths else None
        lines.append(f"head:           {'none, only other arms' if head is None else f'{head}, as it is'}")
    lines.append(
        f"score memory:   {gib(size.served_bytes)} weights + {recipe.score.kv_cache_gib} GiB KV cache (CPU) + the head, "
        "per engine; one engine at a time"
    )
    return Plan(lines=lines, refusal=refusal)


def _target_lines(run: Run, size: TargetSize) -> list[str]:
    model = run.target_dir
    lines = [
        f"target:         {model}: {size.parameters / 1e9:.3g} billion parameters, {gib(size.weight_bytes)} "
        f"in {run.recipe.features.dtype}"
    ]
    if size.served_bytes < size.weight_bytes:
        lines[0] += f", {gib(size.served_bytes)} as published (MXFP4)"
    if is_packaged(run.target_dir):
        lines.append(
            f"{INDENT}its config comes with eyas, because the hub did not give it; a run needs the model itself"
        )
    return lines


def _stage_word(run: Run, name: str) -> str:
    return f"{name} (there)" if (run.directory(name) / MANIFEST).is_file() else name


def _token_lines(found: TokenEstimate | None) -> list[str]:
    if found is None:
        return [
            "tokens:         not known before the data is here, so the disk is not checked; give --tokens and --answer-share"
        ]
    tokens = found.tokens
    return [
        f"tokens:         {tokens.total:,} in {found.documents:,} conversations, {found.how}",
        f"answers:        {tokens.answers:,} tokens, {100 * tokens.answer_share:.0f} % of all",
    ]


def _store_lines(facts: PlanFacts) -> list[str]:
    """Disk of the feature store: as the recipe stores it, and as the other forms would."""
    recipe, found = facts.run.recipe, facts.found
    if not facts.stores_features:
        return ["features disk:  none (features.mode=online)"]
    own = store_form(recipe)
    lines = []
    for label, form in [("as the recipe says", own), *FORMS.items()]:
        if form.last_everywhere != own.last_everywhere:
            continue
        per_token = facts.token_bytes(form)
        disk = "unknown" if found is None else gib(found.tokens.total * per_token)
        name = "features disk:" if form is own else ""
        lines.append(f"{name:<15} {disk} {label}: {per_token:,.0f} bytes a token")
    lines += _room_lines(facts)
    if recipe.data.generation.keep_states:
        per_token = facts.token_bytes(own, everywhere=True)
        lines.append(f"{INDENT}and {per_token:,.0f} bytes a token for the states of generation, beside them")
    return lines


def _room_lines(facts: PlanFacts) -> list[str]:
    """A word about a disk that limits of the recipe could fill, though its data may be smaller."""
    existing, free = free_bytes(facts.run.run_dir)
    if facts.found is None or not facts.found.at_most or free >= facts.needed_bytes():
        return []
    return [f"{INDENT}the disk of {existing} has {gib(free)} free, which may not be enough"]


def _refusal(facts: PlanFacts) -> str | None:
    needed = facts.needed_bytes()
    existing, free = free_bytes(facts.run.run_dir)
    if free >= needed or (facts.found is not None and facts.found.at_most):
        return None
    return (
        f"the disk of {existing} has {gib(free)} free and the run needs {gib(needed)}; set run_dir=... to a larger one, "
        "features.storage=fp8, features.teacher=top-k, features.mode=online, or lower data.max_train_tokens"
    )


def _memory_lines(facts: PlanFacts, *, devices: int) -> list[str]:
    least, most = facts.heads
    bound = "" if least.total == most.total else "at most "
    online = facts.run.recipe.features.mode == "online"
    lines = [] if online else [f"extract memory: about {gib(facts.extraction_memory(devices=devices))} per device"]
    target = ", and the target beside it" if online else ""
    return [
        *lines,
        f"head:           {bound}{most.total / 1e6:.1f} million trained parameters",
        f"train disk:     {bound}{gib(facts.checkpoint_bytes(most))} (checkpoints and the head)",
        f"train memory:   {bound}about {gib(facts.training_memory())} per process (16 bytes per trained parameter; "
        f"the target's lm_head; activations of a pack{target})",
    ]


def _time_lines(facts: PlanFacts, *, options: PlanOptions) -> list[str]:
    """FLOPs of what is proportional to tokens, and times when the hardware is named."""
    if facts.found is None:
        return []
    lines = [f"FLOPs:          extract {facts.extraction_flops():.3g}, train {facts.training_flops():.3g}"]
    hardware, devices = options.hardware, options.devices
    if hardware is None:
        return [*lines, "time:           name the hardware: --hardware here (measured in a second), h100, h200, ..."]
    spent = facts.hours(hardware=hardware, devices=devices)
    kind = "measured" if hardware.measured else "the vendor's figure"
    decoding = (
        f", regenerate {estimate.GENERATE_SHARE:g} of the memory's bandwidth or of it" if "regenerate" in spent else ""
    )
    return [
        *lines,
        f"time:           {', '.join(f'{name} {_duration(value)}' for name, value in spent.items())} on {devices} x "
        f"{hardware.name}",
        f"{INDENT}at {hardware.flops / 1e12:.3g} TFLOP/s ({kind}); assumed shares of it: extract "
        f"{estimate.EXTRACT_SHARE:g}, train {estimate.TRAIN_SHARE:g}{decoding}. Scoring depends on the protocol and is "
        "not in it.",
        *(INDENT + fit_line(facts, step, hardware=hardware) for step in steps_of(facts, devices=devices)),
    ]


def _duration(hours: float) -> str:
    seconds = hours * estimate.HOUR
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * estimate.HOUR else f"{hours:.1f} h"
