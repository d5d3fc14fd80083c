"""The text of `eyas plan`: which stages a run would do, and what it will take in disk, memory, FLOPs and hours."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.heads.config import DEFAULT_CAPTURED
from eyas.recipes import estimate
from eyas.recipes.estimate import HeadSize
from eyas.recipes.estimate_tokens import TokenEstimate, estimate_tokens
from eyas.recipes.hardware import GIB, Hardware
from eyas.recipes.run import Run, plan_run, stage_names
from eyas.recipes.schema import Recipe
from eyas.recipes.stage import MANIFEST, free_bytes
from eyas.recipes.store_form import FORMS, store_form
from eyas.recipes.target_size import TargetSize, read_target_size
from eyas.recipes.train_stages import captured_layers, head_sizes
from eyas.train.features.encoding import bytes_per_token


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the command line adds to a recipe: hardware to estimate hours for, and tokens when no file tells them."""

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
        f"target:         {run.target_dir}: {size.parameters / 1e9:.3g} billion parameters, {_gib(size.weight_bytes)}",
        f"stages:         {', '.join(_stage_word(run, name) for name in names)}",
    ]
    refusal = None
    if "train" in names:
        found = estimate_tokens(run, tokens=options.tokens, answer_share=options.answer_share)
        lines += _token_lines(found)
        refusal = _refusal(run, size=size, found=found)
        lines += _store_lines(run, size=size, found=found)
        lines += _head_lines(run, size=size, found=found)
        lines += _time_lines(run, size=size, found=found, options=options)
    else:
        lines.append(f"head:           {recipe.score.head}, as it is")
    lines.append(
        f"score memory:   {_gib(size.weight_bytes)} weights + {recipe.score.kv_cache_gib} GiB KV cache (CPU) + the head, "
        "per engine; one engine at a time"
    )
    return Plan(lines=lines, refusal=refusal)


def _stage_word(run: Run, name: str) -> str:
    return f"{name} (exists)" if (run.directory(name) / MANIFEST).is_file() else name


def _captured(run: Run) -> int:
    layers = captured_layers(run)
    return DEFAULT_CAPTURED if layers is None else len(layers)


def _token_lines(found: TokenEstimate | None) -> list[str]:
    if found is None:
        return ["tokens:         not known before the data is here; give --tokens and --answer-share"]
    tokens = found.tokens
    return [
        f"tokens:         {tokens.total:,} in {found.conversations:,} conversations, {found.how}",
        f"answers:        {tokens.answers:,} tokens, {100 * tokens.answer_share:.0f} % of all",
    ]


def _store_lines(run: Run, *, size: TargetSize, found: TokenEstimate | None) -> list[str]:
    """Disk of the feature store: as the recipe stores it, and as the other forms would."""
    recipe = run.recipe
    own = store_form(recipe)
    if recipe.features.mode == "online" and recipe.features.cache == "none":
        return ["features disk:  none (features.mode=online)"]
    share = found.tokens.answer_share if found else 1.0
    lines = []
    for label, form in [("as the recipe says", own), *FORMS.items()]:
        if form.last_everywhere != own.last_everywhere:
            continue
        per_token = bytes_per_token(form, hidden_size=size.hidden_size, num_layers=_captured(run), answer_share=share)
        disk = "unknown" if found is None else _gib(found.tokens.total * per_token)
        name = "features disk:" if form is own else ""
        lines.append(f"{name:<15} {disk} {label}: {per_token:,.0f} bytes a token")
    if recipe.data.generation.keep_states:
        lines.append(
            "                and as much again for the states of generation, until the run directory is cleared"
        )
    return lines


def _needed_bytes(run: Run, *, size: TargetSize, found: TokenEstimate | None) -> int:
    recipe, needed = run.recipe, estimate.checkpoint_bytes(head_sizes(run)[0].total)
    stored = recipe.features.mode == "offline" or recipe.features.cache != "none"
    if found is not None and stored and not (run.directory("extract") / MANIFEST).is_file():
        form = store_form(recipe)
        per_token = bytes_per_token(
            form, hidden_size=size.hidden_size, num_layers=_captured(run), answer_share=found.tokens.answer_share
        )
        needed += round(found.tokens.total * per_token * (2 if recipe.data.generation.keep_states else 1))
    return needed


def _refusal(run: Run, *, size: TargetSize, found: TokenEstimate | None) -> str | None:
    needed = _needed_bytes(run, size=size, found=found)
    existing, free = free_bytes(run.run_dir)
    if free >= needed:
        return None
    return (
        f"the disk of {existing} has {_gib(free)} free and the run needs {_gib(needed)}; set run_dir=... to a larger one, "
        "features.storage=fp8, features.teacher=top-k, features.mode=online, or lower data.max_train_tokens"
    )


def _head_lines(run: Run, *, size: TargetSize, found: TokenEstimate | None) -> list[str]:
    features, train = run.recipe.features, run.recipe.train
    least, most = head_sizes(run)
    bound = "" if least.total == most.total else "at most "
    captured = _captured(run)
    memory = estimate.training_memory(
        most.total,
        target=size,
        captured=captured,
        batch_tokens=train.batch_tokens,
        answer_share=found.tokens.answer_share if found else 1.0,
        steps=train.ttt_steps,
        draft_vocab=_draft_vocab(run, size=size),
    )
    lines = [
        f"head:           {bound}{most.total / 1e6:.1f} million trained parameters",
        f"train disk:     {bound}{_gib(estimate.checkpoint_bytes(most.total))} (two checkpoints and the head)",
        f"train memory:   {bound}about {_gib(memory)} per process (16 bytes per trained parameter; embedding and lm_head "
        "of the target; activations)"
        + (f", and {_gib(size.weight_bytes)} for the target beside it" if features.mode == "online" else ""),
    ]
    if features.mode == "offline":
        lines.insert(0, f"extract memory: about {_gib(_extraction_memory(run, size=size))} per device")
    return lines


def _extraction_memory(run: Run, *, size: TargetSize) -> float:
    features, captured = run.recipe.features, _captured(run)
    if features.backend == "vllm":
        return estimate.vllm_memory(
            size,
            captured=captured,
            dtype=features.dtype,
            max_length=run.recipe.data.max_length,
            batch_size=features.batch_size,
            devices=features.tensor_parallel_size,
        )
    return estimate.extraction_memory(
        size, captured=captured, batch_tokens=features.batch_tokens, dtype=features.dtype, devices=1, spread=False
    )


def _draft_vocab(run: Run, *, size: TargetSize) -> int:
    wanted = run.recipe.head.draft_vocab_size
    return wanted if isinstance(wanted, int) else size.vocab_size


def _time_lines(run: Run, *, size: TargetSize, found: TokenEstimate | None, options: PlanOptions) -> list[str]:
    """FLOPs of what is proportional to tokens, and hours when the hardware is named."""
    if found is None:
        return []
    train, tokens = run.recipe.train, found.tokens
    extraction = estimate.extraction_flops(tokens, target=size, mean_length=found.mean_length)
    if run.recipe.features.teacher == "top-k":
        extraction += estimate.teacher_flops(tokens, target=size)
    if run.recipe.features.mode == "online" and run.recipe.features.cache == "none":
        extraction *= train.epochs
    training = estimate.training_flops(
        tokens,
        head=_most(run),
        target=size,
        draft_vocab=_draft_vocab(run, size=size),
        epochs=train.epochs,
        mean_steps=train.ttt_warmup_share + (1 - train.ttt_warmup_share) * train.ttt_steps,
    )
    lines = [f"FLOPs:          extract {extraction:.3g}, train {training:.3g}"]
    if options.hardware is None:
        return [*lines, "time:           name the hardware: --hardware here (measured in a second), h100, h200, ..."]
    hardware, devices = options.hardware, options.devices
    spent = {
        "extract": estimate.hours(extraction, hardware=hardware, devices=devices, share=estimate.EXTRACT_SHARE),
        "train": estimate.hours(training, hardware=hardware, devices=devices, share=estimate.TRAIN_SHARE),
    }
    if run.recipe.data.regenerate:
        seconds = estimate.generation_seconds(
            tokens.answers,
            target=size,
            hardware=hardware,
            devices=devices,
            batch_size=run.recipe.data.generation.batch_size,
        )
        spent = {"regenerate": seconds / estimate.HOUR, **spent}
    kind = "measured" if hardware.measured else "the vendor's figure"
    return [
        *lines,
        f"time:           {', '.join(f'{name} {_duration(value)}' for name, value in spent.items())} on {devices} x {hardware.name}",
        f"                at {hardware.flops / 1e12:.3g} TFLOP/s ({kind}); assumed shares of it: extract "
        f"{estimate.EXTRACT_SHARE:g}, train {estimate.TRAIN_SHARE:g}. Scoring depends on the protocol and is not in it.",
        _fits(run, size=size, hardware=hardware),
    ]


def _fits(run: Run, *, size: TargetSize, hardware: Hardware) -> str:
    needed = _extraction_memory(run, size=size)
    if needed <= hardware.memory:
        return f"                {_gib(needed)} of {_gib(hardware.memory)} memory per device: extraction fits"
    return (
        f"                {_gib(needed)} needed and {_gib(hardware.memory)} there: extraction does NOT fit on one device; use "
        "features.backend=vllm with features.tensor_parallel_size, or features.device_map=auto"
    )


def _most(run: Run) -> HeadSize:
    return head_sizes(run)[1]


def _duration(hours: float) -> str:
    seconds = hours * estimate.HOUR
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * estimate.HOUR else f"{hours:.1f} h"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
