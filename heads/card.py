"""The model card of an exported head: what it is, how it was made and measured, and how to serve it.

Made from plain values, so that whoever exports decides what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eyas.heads.config import HeadConfig
from eyas.heads.formats.files import Format

TAU = (
    "tau is the mean number of tokens that one forward pass of the target yields: the accepted draft tokens and the token "
    "that the target adds itself (bonus token included). Chains are greedy, of length {length}; a token counts only if all "
    "before it in its chain are accepted (prefix-joint); chains follow each other as in serving, each starting where the "
    "last one ended (step-weighted)."
)
PAPERS = {
    "eagle": "EAGLE (arXiv 2401.15077)",
    "eagle3": "EAGLE-3 (arXiv 2503.01840)",
}


def model_card(
    *,
    name: str,
    base_model: str,
    revision: str | None,
    config: HeadConfig,
    data_fingerprint: str,
    training: Mapping[str, Any],
    heldout: Mapping[str, Any],
    coverage: float | None,
    to: Format,
    draft_tokens: int,
) -> str:
    """Markdown with YAML front matter, as the Hugging Face hub reads it.

    Args:
        base_model: hub id of the target, or its directory where it was trained; `revision` of a hub model.
        training: settings worth telling, in the order to tell them.
        heldout: what training measured on held-out conversations (heldout.json).
        coverage: share of the tokens in answers that the draft vocabulary holds; None if not measured.
        to: the layout that the head is written in; `draft_tokens` to draft per step.
    """
    parts = [
        _front_matter(base_model, config),
        f"# {name}",
        f"A draft head for speculative decoding with `{base_model}`, trained with eyas. Decoding with it gives the target's "
        "own output; the head only proposes tokens that the target then checks.",
        "## The head",
        _table(_head_rows(base_model, revision, config, coverage=coverage, to=to)),
        "## Training",
        _table(
            [("data fingerprint", f"`{data_fingerprint}`"), *((key, _shown(value)) for key, value in training.items())]
        ),
        "## Held-out acceptance",
        _heldout(heldout),
        "## Serving",
        _serving(base_model, config, to=to, draft_tokens=draft_tokens),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(base_model: str, config: HeadConfig) -> str:
    # JSON strings are YAML strings, whatever the name holds.
    lines = [
        *([f"base_model: {json.dumps(base_model)}"] if _is_hub_id(base_model) else []),
        "library_name: vllm",
        "pipeline_tag: text-generation",
        f"tags: [speculative-decoding, {config.kind}, draft-model, eyas]",
    ]
    return "\n".join(["---", *lines, "---"])


def _head_rows(
    base_model: str, revision: str | None, config: HeadConfig, *, coverage: float | None, to: Format
) -> list[tuple[str, str]]:
    layers = "the last state, after the final norm"
    if config.kind == "eagle3":
        layers = "after layers " + ", ".join(str(layer) for layer in config.capture_layers or ())
        if config.capture_layers is None:
            layers = "after layers 2, L//2 and L-3"
    vocabulary = f"{config.draft_vocab_size} of {config.vocab_size} tokens"
    if coverage is not None:
        vocabulary += f", which are {coverage:.2%} of those in answers"
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "own_embedding")
    variants = [name for name in (*switches, "fc_bias") if getattr(config, name)]
    if config.window is not None:
        variants.append(f"sliding window of {config.window} tokens")
    method = PAPERS[config.kind] + (", as EAGLE-3.1" if config.fc_norm and config.norm_output else "")
    return [
        ("base model", f"`{base_model}`" + ("" if revision is None else f" at {revision}")),
        ("method", method),
        ("layout of the files", to),
        ("layers", f"{config.num_layers} ({config.layer}), hidden size {config.hidden_size}"),
        ("reads the target", layers),
        ("draft vocabulary", vocabulary),
        ("variants", ", ".join(variants) or "none"),
    ]


def _heldout(heldout: Mapping[str, Any]) -> str:
    tau, length = heldout.get("heldout_tau"), heldout.get("chain_length")
    if tau is None:
        return "Not measured."
    rows = [("tau", f"{tau:.3f}"), ("chain length", _shown(length))]
    marginal = heldout.get("heldout_marginal") or ()
    rows += [(f"accepted at position {index + 1}", f"{value:.3f}") for index, value in enumerate(marginal)]
    names = {
        "heldout_drafts": "chains",
        "heldout_conversations": "conversations",
        "draft_coverage_heldout": "draft vocabulary's share of the held-out tokens",
        "estimator": "estimator",
    }
    rows += [(label, _shown(heldout[key])) for key, label in names.items() if heldout.get(key) is not None]
    warning = (
        "Acceptance is no claim about speed: what a draft costs, the batch size and the hardware decide that. Measure both "
        "arms where you serve."
    )
    return "\n\n".join([TAU.format(length=_shown(length)), _table(rows), warning])


def _serving(base_model: str, config: HeadConfig, *, to: Format, draft_tokens: int) -> str:
    if config.fc_bias:
        return "vLLM's EAGLE head has no bias in fc, so this head is served by the EAGLE repository's own code only."
    target = base_model if _is_hub_id(base_model) else "TARGET_DIRECTORY"
    speculative = {"method": config.kind, "model": "PATH_OF_THIS_DIRECTORY", "num_speculative_tokens": draft_tokens}
    parts = ["vLLM:", f"```bash\nvllm serve {target} --speculative-config '{json.dumps(speculative)}'\n```"]
    if to == "vllm":
        parts += ["SGLang (not tested here):", _sglang(target, config, draft_tokens=draft_tokens)]
    return "\n\n".join(parts)


def _sglang(target: str, config: HeadConfig, *, draft_tokens: int) -> str:
    command = [
        f"python -m sglang.launch_server --model-path {target}",
        f"--speculative-algorithm {'EAGLE3' if config.kind == 'eagle3' else 'EAGLE'}",
        "--speculative-draft-model-path PATH_OF_THIS_DIRECTORY",
        f"--speculative-num-steps {draft_tokens} --speculative-eagle-topk 1",
        f"--speculative-num-draft-tokens {draft_tokens + 1}",
    ]
    shown = "```bash\n" + " \\\n  ".join(command) + "\n```"
    if config.kind == "eagle":
        shown += "\n\nSGLang calls this head `LlamaForCausalLMEagle`: set `architectures` in config.json to that first."
    return shown


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _table(rows: list[tuple[str, str]]) -> str:
    lines = [f"| {_cell(key)} | {_cell(value)} |" for key, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)
