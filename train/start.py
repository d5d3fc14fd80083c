"""Which head a run trains and what it starts from: new from the target, or another head's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eyas.heads.build import build_head
from eyas.heads.config import HeadConfig, Kind, LayerStyle, head_config_for_target, load_target_config
from eyas.heads.formats.files import Format
from eyas.heads.formats.read import read_head
from eyas.heads.formats.write import require_expressible, working_layout
from eyas.heads.head import DraftHead
from eyas.heads.initialise import HeadStart, freeze, new_head, require_start
from eyas.heads.target import TargetPieces
from eyas.heads.vocab import choose_draft_vocabulary, coverage, size_for_coverage
from eyas.train.features.documents import Documents


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """The head to train, in the terms of a recipe; None is the target's own size.

    Attributes:
        draft_vocab_size: D; None is the whole vocabulary, "auto" the smallest size that covers `draft_coverage` of the
            held-out answers. An EAGLE head always has the whole vocabulary.
        vocabulary: "data" chooses the draft vocabulary from the training answers; "reuse" takes that of `init_head`.
        init_head: directory of a head to go on from, in any of the formats.
    """

    kind: Kind
    layer: LayerStyle
    num_layers: int
    hidden_size: int | None
    intermediate_size: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    attention_bias: bool
    sliding_window: int | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    fc_bias: bool
    draft_vocab_size: int | Literal["auto"] | None
    draft_coverage: float
    vocabulary: Literal["data", "reuse"]
    start: HeadStart
    init_head: Path | None


def start_head(
    plan: HeadPlan,
    *,
    target_dir: Path,
    target: Any,
    pieces: TargetPieces,
    documents: Documents,
    heldout: Documents,
    capture_layers: tuple[int, ...],
    stop_token_ids: Sequence[int],
    seed: int,
    say: Callable[[str], None],
) -> DraftHead:
    """The head at step 0, in float32.

    Args:
        target: transformers configuration of the target.
        documents, heldout: training and held-out documents, whose answers choose the draft vocabulary and judge its size.
        capture_layers: layers whose states the documents hold.
        say: takes a line that the user should read.

    Raises:
        ValueError: plan, target, store and `init_head` do not fit together.
    """
    layers = required_layers(plan, stored=capture_layers)
    counts_V = documents.answer_token_counts(vocab_size=target.vocab_size)

    def vocabulary(size: int) -> Tensor:
        return choose_draft_vocabulary(counts_V, size=size, always=stop_token_ids)

    if plan.init_head is not None:
        head = read_head(plan.init_head, target_config=target).train()
        _require_same_shape(head.config, plan, layers=layers, target=target)
        if plan.vocabulary == "data" and head.config.draft_vocab_size < head.config.vocab_size:
            _require_same_vocabulary(head, vocabulary(head.config.draft_vocab_size))
        head = _adapted(head, plan, target=target, pieces=pieces, say=say)
        freeze(head, train_lm_head=plan.start.train_lm_head)
        _say_coverage(head, heldout, say=say)
        return head
    size = plan.draft_vocab_size or target.vocab_size
    if plan.kind == "eagle":
        size = target.vocab_size
    elif size == "auto":
        size = size_for_coverage(
            counts_V,
            heldout_counts_V=heldout.answer_token_counts(vocab_size=target.vocab_size),
            share=plan.draft_coverage,
            always=stop_token_ids,
        )
    head = new_head(
        planned_config(plan, target=target, capture_layers=layers, draft_vocab_size=size),
        draft_to_target_D=vocabulary(size),
        pieces=pieces,
        target_dir=target_dir,
        num_target_layers=target.num_hidden_layers,
        start=plan.start,
        seed=seed,
    )
    _say_coverage(head, heldout, say=say)
    return head


def _say_coverage(head: DraftHead, heldout: Documents, *, say: Callable[[str], None]) -> None:
    answers_V = heldout.answer_token_counts(vocab_size=head.config.vocab_size)
    share = coverage(answers_V, draft_to_target_D=head.draft_to_target_D)
    say(
        f"draft vocabulary: {head.config.draft_vocab_size} of {head.config.vocab_size} tokens, which cover {share:.1%} of the "
        "held-out answer tokens"
    )


def required_layers(plan: HeadPlan, *, stored: tuple[int, ...]) -> tuple[int, ...]:
    """Capture layers of the head, of documents that hold `stored`: an EAGLE head reads none of them."""
    if plan.kind == "eagle":
        return ()
    if not stored:
        raise ValueError("the features hold no captured layers, and an EAGLE-3 head reads them; extract again")
    return stored


def planned_config(
    plan: HeadPlan, *, target: Any, capture_layers: tuple[int, ...], draft_vocab_size: int
) -> HeadConfig:
    """Configuration of a new head for a target (its transformers configuration)."""
    return head_config_for_target(
        target,
        kind=plan.kind,
        layer=plan.layer,
        num_layers=plan.num_layers,
        draft_vocab_size=draft_vocab_size,
        capture_layers=capture_layers,
        hidden_size=plan.hidden_size,
        intermediate_size=plan.intermediate_size,
        num_attention_heads=plan.num_attention_heads,
        num_key_value_heads=plan.num_key_value_heads,
        head_dim=plan.head_dim,
        attention_bias=plan.attention_bias,
        sliding_window=plan.sliding_window,
        norm_before_residual=plan.norm_before_residual,
        norm_before_fc=plan.norm_before_fc,
        fc_norm=plan.fc_norm,
        norm_output=plan.norm_output,
        fc_bias=plan.fc_bias,
    )


def require_possible(
    plan: HeadPlan,
    *,
    target_dir: Path,
    capture_layers: tuple[int, ...],
    trust_remote_code: bool,
    layout: Format,
) -> None:
    """Fail before features are extracted when this head cannot be made for this target, or not be exported in `layout`.

    Raises:
        ValueError: what does not fit, and the setting that mends it.
    """
    target = load_target_config(target_dir, trust_remote_code=trust_remote_code)
    layers = () if plan.kind == "eagle" else capture_layers
    if plan.init_head is not None:
        head = read_head(plan.init_head, target_config=target)
        _require_same_shape(head.config, plan, layers=layers, target=target)
        kept = replace(head.config, fc_bias=plan.fc_bias and head.config.fc_bias)
        _require_layout(kept, layout)
        return
    size = plan.draft_vocab_size if isinstance(plan.draft_vocab_size, int) else target.vocab_size
    config = planned_config(plan, target=target, capture_layers=layers, draft_vocab_size=size)
    require_start(config, target_dir=target_dir, num_target_layers=target.num_hidden_layers, start=plan.start)
    require_expressible(config, to=working_layout(config))
    _require_layout(config, layout)


def _require_layout(config: HeadConfig, layout: Format) -> None:
    try:
        require_expressible(config, to=layout)
    except ValueError as error:
        raise ValueError(f"export.format={layout}: {error}") from error


def _require_same_shape(head: HeadConfig, plan: HeadPlan, *, layers: tuple[int, ...], target: Any) -> None:
    """A recipe may repeat the shape of the head it starts from, and must not contradict it."""
    if (head.target_hidden_size, head.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"init.head {plan.init_head} is for a target of hidden size {head.target_hidden_size} and {head.vocab_size} "
            f"tokens, and this target has {target.hidden_size} and {target.vocab_size}"
        )
    if head.kind != plan.kind:
        raise ValueError(f"init.head {plan.init_head} is of kind {head.kind}; set head.kind={head.kind}")
    if head.capture_layers != layers:
        raise ValueError(
            f"init.head {plan.init_head} reads layers {list(head.capture_layers or ())}, and the features hold "
            f"{list(layers)}; set features.capture_layers={list(head.capture_layers or ())} and extract again"
        )
    asked = {
        "layer": plan.layer if plan.layer != "llama" else None,
        "num_layers": plan.num_layers if plan.num_layers != 1 else None,
        "draft_vocab_size": (plan.draft_vocab_size or head.vocab_size) if plan.draft_vocab_size != "auto" else None,
        "sliding_window": plan.sliding_window,
    }
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    flags = ("attention_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "fc_bias")
    asked |= {name: getattr(plan, name) for name in sizes}
    asked |= {name: getattr(plan, name) or None for name in flags}
    for name, value in asked.items():
        if value is not None and value != getattr(head, name):
            raise ValueError(
                f"head.{name}={value} contradicts init.head {plan.init_head}, where it is {getattr(head, name)}; remove one"
            )


def _require_same_vocabulary(head: DraftHead, vocabulary_D: Tensor) -> None:
    own_D = head.draft_to_target_D
    if not torch.equal(own_D, vocabulary_D):
        shared = int(torch.isin(own_D, vocabulary_D).sum())
        raise ValueError(
            f"the draft vocabulary of init.head was chosen from other data: {shared} of its {own_D.shape[0]} tokens are "
            "those that this data would choose; set head.vocabulary=reuse to keep it (its coverage of held-out answers is "
            "reported after training)"
        )


def _adapted(
    head: DraftHead, plan: HeadPlan, *, target: Any, pieces: TargetPieces, say: Callable[[str], None]
) -> DraftHead:
    """The head without what training leaves behind: a copy of the target's embedding, and a bias in fc nobody asked for.

    An own embedding that is the target's is shared again, as the engine would, so that nothing trains it. A bias in fc
    belongs to the original repository's layout and has no place in vLLM.
    """
    config, state = head.config, dict(head.state_dict())
    # vLLM stops drafting beyond the head's own length, and published heads often name a short one.
    length = max(config.max_position_embeddings, target.max_position_embeddings)
    config = replace(config, max_position_embeddings=length)
    if head.embed_tokens is not None and _is_copy(head.embed_tokens.weight.detach(), of=pieces.embedding_VH):
        config = replace(config, own_embedding=False)
        del state["embed_tokens.weight"]
    if config.fc_bias and not plan.fc_bias:
        say(f"fc.bias of {plan.init_head} is left out, since head.fc_bias is false")
        config = replace(config, fc_bias=False)
        del state["fc.bias"]
    if config == head.config:
        return head
    adapted = build_head(config, draft_to_target_D=head.draft_to_target_D)
    adapted.load_state_dict(state)
    return adapted.float()


def _is_copy(own_VH: Tensor, *, of: Tensor) -> bool:
    """Whether an embedding is the target's; a head saved in a narrower type carries a rounded copy."""
    return own_VH.shape == of.shape and torch.equal(own_VH.to(torch.bfloat16), of.to(torch.bfloat16))
