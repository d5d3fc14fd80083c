"""The text of `eyas plan`: which stages a run would do, and what it will take in disk, memory, FLOPs and time."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.recipes import estimate
from eyas.recipes.disk import free_bytes
from eyas.recipes.estimate_tokens import TokenEstimate, estimate_tokens
from eyas.recipes.fitting import fit_line, steps_of
from eyas.recipes.hardware import Hardware, gib
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
    trains, refusal = "train" in names, None
    found = estimate_tokens(run, tokens=options.tokens, answer_share=options.answer_share) if trains else None
    facts = PlanFacts(run=run, size=size, found=found)
    if trains:
        refusal = _refusal(facts)
        lines += [*_token_lines(found), *_store_lines(facts), *_memory_lines(facts, devices=options.devices)]
    else:
        head = recipe.score.head if recipe.score.draft_lengths else None
        lines.append(f"head:           {'none, only other arms' if head is None else f'{head}, as it is'}")
    lines += [*_score_lines(facts), *_time_lines(facts, options=options), *_fit_lines(facts, options, trains=trains)]
    return Plan(lines=lines, refusal=refusal)


def _target_lines(run: Run, size: TargetSize) -> list[str]:
    model = run.target_dir
    lines = [
        f"target:         {model}: {size.parameters / 1e9:.3g} billion parameters, {gib(size.weight_bytes)} "
        f"in {run.recipe.features.dtype}"
    ]
    served = size.served_bytes(run.recipe.features.dtype)
    if served < size.weight_bytes:
        lines[0] += f", {gib(served)} as published (MXFP4)"
    if run.not_the_target is not None:
        lines.append(
            f"{INDENT}a copy of its config comes with eyas; a run needs the model itself. {run.not_the_target}"
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
        "features.storage=fp8, features.teacher=top-k, features.mode=online with features.backend=hf, or lower data.max_train_tokens"
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


def _score_lines(facts: PlanFacts) -> list[str]:
    score = facts.run.recipe.score
    return [
        f"score memory:   about {gib(facts.serving_memory())} per GPU (weights, the head, keys and values of "
        f"{max(score.batch_sizes)} requests of {score.max_model_len:,} tokens), {gib(facts.cpu_serving_memory())} on a CPU; "
        "one engine at a time"
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
        *_side_by_side(facts, hardware=hardware, devices=devices),
        f"{INDENT}at {hardware.flops / 1e12:.3g} TFLOP/s ({kind}); assumed shares of it: extract "
        f"{estimate.EXTRACT_SHARE:g}, train {estimate.TRAIN_SHARE:g}{decoding}. Conversations are taken to have "
        f"{facts.found.mean_length:,.0f} tokens{', the most they may have' if facts.found.at_most else ''}. Scoring "
        "depends on the protocol and is not in it.",
    ]


def _side_by_side(facts: PlanFacts, *, hardware: Hardware, devices: int) -> list[str]:
    """What the times divide by, where one command alone does not."""
    data, parts = facts.run.recipe.data, []
    engines, tasks = facts.answering_engines(devices=devices), facts.extracting_tasks(devices=devices)
    if data.regenerate and engines > 1:
        alone = _duration(facts.answering_hours(hardware=hardware))
        parts.append(f"{engines} engines answer (data.generation.servers.urls; one takes {alone})")
    if facts.run.recipe.features.mode == "offline" and tasks > 1:
        alone = _duration(facts.extracting_hours(hardware=hardware))
        parts.append(f"{tasks} tasks extract (--part or --extract-tasks {tasks}; one takes {alone})")
    return [f"side by side:   {', '.join(parts)}"] if parts else []


def _fit_lines(facts: PlanFacts, options: PlanOptions, *, trains: bool) -> list[str]:
    """Whether each step has the memory it needs, when the hardware is named."""
    hardware, devices = options.hardware, options.devices
    if hardware is None:
        return []
    steps = steps_of(facts, hardware=hardware, devices=devices, trains=trains)
    return [INDENT + fit_line(facts, step, hardware=hardware, devices=devices) for step in steps]


def _duration(hours: float) -> str:
    seconds = hours * estimate.HOUR
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * estimate.HOUR else f"{hours:.1f} h"
