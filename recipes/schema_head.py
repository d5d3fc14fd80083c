"""The sections of a recipe that say which head is trained and what it starts from."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from eyas.recipes.section import Number, Section


class Head(Section):
    """Shape of the draft head. `eagle3` with fc_norm and norm_output is EAGLE-3.1."""

    kind: Literal["eagle", "eagle3"] = Field(default="eagle3", description="architecture: EAGLE-1 or EAGLE-3")
    layer: Literal["llama", "qwen3"] = Field(default="llama", description="draft layer; qwen3 norms queries and keys")
    num_layers: int = Field(default=1, ge=1, description="decoder layers")
    draft_vocab_size: int | Literal["auto"] | None = Field(
        default="auto",
        description="tokens the head can draft, the most frequent ones; null = the target's vocabulary, auto = as few as "
        "reach draft_coverage. An EAGLE head has the target's vocabulary",
    )
    draft_coverage: Number = Field(
        default=0.97, gt=0, le=1, description="share of held-out answer tokens that draft_vocab_size=auto covers"
    )
    vocabulary: Literal["data", "reuse"] = Field(
        default="data", description="draft vocabulary chosen from the training answers, or that of init.head"
    )
    hidden_size: int | None = Field(default=None, gt=0, description="null = the target's; another brings an embedding")
    intermediate_size: int | None = Field(default=None, gt=0, description="width of the MLP; null = the target's")
    num_attention_heads: int | None = Field(default=None, gt=0, description="query heads; null = the target's")
    num_key_value_heads: int | None = Field(default=None, gt=0, description="key and value heads; null = the target's")
    head_dim: int | None = Field(default=None, gt=0, multiple_of=2, description="width of a head; null = the target's")
    attention_bias: bool = Field(default=False, description="biases in the attention projections")
    sliding_window: int | None = Field(
        default=None, gt=0, description="tokens attention reaches back; null = as the target"
    )
    norm_before_residual: bool = Field(default=False, description="EAGLE-3: residual of the normed feature")
    norm_before_fc: bool = Field(default=False, description="EAGLE-3: one norm over all captured layers before fc")
    fc_norm: bool = Field(default=False, description="EAGLE-3.1: a norm for each captured layer before fc")
    norm_output: bool = Field(default=False, description="EAGLE-3.1: feed back the normed output")
    fc_bias: bool = Field(default=False, description="EAGLE: bias in fc, as in the original repository; not for vLLM")

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        query, key_value = self.num_attention_heads, self.num_key_value_heads
        if query is not None and key_value is not None and query % key_value:
            raise ValueError(f"num_attention_heads {query} is no multiple of num_key_value_heads {key_value}")
        return self

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        if isinstance(self.draft_vocab_size, int) and self.draft_vocab_size < 2:
            raise ValueError(f"draft_vocab_size: {self.draft_vocab_size} is too small; at least 2")
        if self.kind == "eagle" and self.vocabulary == "reuse":
            raise ValueError("vocabulary: an EAGLE head has the target's vocabulary; remove it")
        return self

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind == "eagle3":
            if self.fc_bias:
                raise ValueError("fc_bias: an EAGLE-3 head has no bias in fc; remove it or set kind to eagle")
            return self
        eagle3_only = {
            "layer": self.layer != "llama",
            "draft_vocab_size": isinstance(self.draft_vocab_size, int),
            "hidden_size": self.hidden_size is not None,
            "sliding_window": self.sliding_window is not None,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
        }
        for name, used in eagle3_only.items():
            if used:
                raise ValueError(f"{name}: an EAGLE head has no such choice; remove it or set kind to eagle3")
        return self


class Init(Section):
    """What the head starts from: parts of the target, random numbers, or another head."""

    head: str | None = Field(default=None, min_length=1, description="directory of a head to go on from, any format")
    lm_head: Literal["target", "random"] = Field(default="target", description="EAGLE-3: rows of the target's lm_head")
    train_lm_head: bool | None = Field(
        default=None,
        description="EAGLE-3: false keeps lm_head frozen; null = trained (EAGLE reads out with the target's)",
    )
    final_norm: Literal["target", "ones"] = Field(default="ones", description="EAGLE-3: norm before lm_head")
    layer: Literal["target", "random"] | None = Field(
        default=None,
        description="draft layers from the target's last ones; null = target for EAGLE-3, random for EAGLE",
    )

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        if self.head is not None:
            parts = {"lm_head": "target", "final_norm": "ones", "layer": None}
            for name, default in parts.items():
                if getattr(self, name) != default:
                    raise ValueError(f"{name}: nothing is initialised when init.head is given; remove one of the two")
        return self
