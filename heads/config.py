"""Shape of a draft head, as one frozen record. It is what a head directory's config.json says, without the file format."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """An EAGLE-3 head of one decoder layer (Li et al., 2025, arXiv 2503.01840).

    Attributes:
        hidden_size: H, the head's and the target's hidden size.
        vocab_size: V, the target's vocabulary; draft_vocab_size: D, the tokens the head can propose.
        capture_layers: ids of the captured layers, ascending. Id k is the residual stream after k decoder layers.
        rope_parameters: rotary settings in transformers' form (`rope_type`, `rope_theta`, ...), taken from the target.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    capture_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"head.num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"head.num_key_value_heads={self.num_key_value_heads}; grouped-query attention needs that"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"head.draft_vocab_size={self.draft_vocab_size} must lie between 1 and the target's {self.vocab_size}"
            )
        if list(self.capture_layers) != sorted(set(self.capture_layers)) or not self.capture_layers:
            raise ValueError(
                f"capture_layers={list(self.capture_layers)} must be ascending and without repeats: vLLM sorts them, "
                "and a head trained on another order would read the wrong layers"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `HeadConfig.from_dict` reads it back."""
        return {**asdict(self), "capture_layers": list(self.capture_layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadConfig:
        """Inverse of `to_dict`."""
        return cls(**{**values, "capture_layers": tuple(values["capture_layers"])})


def default_capture_layers(num_layers: int) -> tuple[int, ...]:
    """Layer ids 2, L//2 and L-3, the choice of EAGLE-3 and vLLM's default, for a target of `num_layers` layers."""
    layers = tuple(sorted({2, num_layers // 2, num_layers - 3}))
    if len(layers) < 3 or layers[0] < 1:
        raise ValueError(
            f"a target of {num_layers} layers has no default capture layers (2, L//2, L-3 must differ); "
            "set features.capture_layers, for example [1, 2, 3]"
        )
    return layers


def load_target_config(target_dir: Path, *, trust_remote_code: bool = False) -> Any:
    """The target's text configuration (transformers), whatever wraps it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(target_dir, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"transformers cannot read the config of the target {target_dir}: {error}") from error
    return config.get_text_config()


def head_config_for_target(
    target_config: Any,
    *,
    draft_vocab_size: int,
    capture_layers: tuple[int, ...],
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
) -> HeadConfig:
    """A head for a target, with the target's own layer sizes wherever None is given.

    Raises:
        ValueError: a captured layer does not exist in the target, or sizes do not fit together.
    """
    num_layers = target_config.num_hidden_layers
    if not all(1 <= layer <= num_layers for layer in capture_layers):
        raise ValueError(
            f"capture_layers={list(capture_layers)} must lie between 1 and the target's {num_layers} layers"
        )
    heads = target_config.num_attention_heads
    own_head_dim = target_config.to_dict().get("head_dim") or target_config.hidden_size // heads
    return HeadConfig(
        hidden_size=target_config.hidden_size,
        intermediate_size=intermediate_size or target_config.intermediate_size,
        num_attention_heads=num_attention_heads or heads,
        num_key_value_heads=num_key_value_heads or target_config.num_key_value_heads,
        head_dim=head_dim or own_head_dim,
        vocab_size=target_config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=target_config.rms_norm_eps,
        rope_parameters=dict(target_config.rope_parameters),
        max_position_embeddings=target_config.max_position_embeddings,
        capture_layers=capture_layers,
    )
