"""The data section of a recipe: where conversations come from, what is left out of them, and who writes the answers."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from eyas.recipes.section import DType, Number, Section

MIN_MAX_LENGTH = 8
"""Tokens below which a conversation holds no user turn, answer and chain worth drafting."""

Positive = Annotated[Number, Field(gt=0)]
Temperature = Annotated[Number, Field(ge=0)]


class Source(Section):
    """One place that conversations come from: a preset, a hub dataset, files, or a package."""

    preset: str | None = Field(default=None, min_length=1, description="named source to start from (`eyas presets`)")
    path: str | None = Field(
        default=None,
        min_length=1,
        description="hub id, file or glob, builtin:FILE, or package:NAME; null = the preset's",
    )
    name: str | None = Field(default=None, min_length=1, description="label in counts; null = preset or path")
    config: str | None = Field(default=None, description="configuration of a hub dataset")
    split: str = Field(default="train", min_length=1, description="split of a hub dataset")
    revision: str | None = Field(default=None, description="git revision of a hub dataset; null = the default branch")
    data_files: str | None = Field(default=None, description="files of a hub dataset, as a glob")
    streaming: bool = Field(
        default=True, description="read a hub dataset as it arrives instead of downloading it first"
    )
    format: Literal["auto", "messages", "sharegpt", "pairs", "text"] = Field(
        default="auto", description="how rows hold a conversation; auto = detected, and told"
    )
    columns: dict[str, str] = Field(default_factory=dict, description="column of each part, such as {prompt: question}")
    weight: Number | None = Field(
        default=None, gt=0, description="share in the mix; null everywhere = all of each source"
    )
    limit: int | None = Field(default=None, gt=0, description="conversations taken at most")

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.preset is None and self.path is None:
            raise ValueError("path: missing; name a hub id, a file, builtin:FILE or package:NAME, or a preset")
        return self


class Filters(Section):
    """What is left out before anything is generated or tokenised; everything dropped is counted by reason."""

    min_turns: int = Field(default=1, ge=1, description="user turns at least")
    max_turns: int | None = Field(default=None, gt=0, description="user turns at most")
    min_characters: int = Field(default=1, ge=1, description="characters of the first user turn at least")
    max_characters: int | None = Field(default=None, gt=0, description="characters of all turns together at most")
    languages: tuple[str, ...] = Field(
        default=(), strict=False, description="languages of the first user turn to keep, such as [en, de]; [] = all"
    )


class Guard(Section):
    """Training prompts that overlap evaluation prompts are removed and counted.

    Evaluation prompts are those of the held-out conversations, of HumanEval when it is scored, and of `sources`.
    """

    enabled: bool = Field(default=True, description="false = leave overlapping prompts in; the report says so")
    ngram: int | None = Field(
        default=13, ge=3, description="words in a row that count as overlap; null = whole prompts only"
    )
    sources: tuple[Source, ...] = Field(
        default=(), strict=False, description="further evaluation sets, as data.sources"
    )


class SelfPrompts(Section):
    """User turns that the target writes itself, sampled from the user prefix of its chat template."""

    count: int = Field(default=0, ge=0, description="user turns to sample; 0 = none")
    topics: str | None = Field(
        default=None, description="file of topics, one a line, or builtin:topics.txt; null = none"
    )
    openers: str | None = Field(default=None, description="file of first words, one a line; null = none")
    seed: int = Field(default=0, ge=0, description="seed of topics and sampling")
    temperature: Temperature = Field(default=0.9, description="sampling temperature of user turns")
    min_p: Number = Field(default=0.05, ge=0, lt=1, description="least share of the likeliest token's probability")
    max_tokens: int = Field(default=80, gt=0, description="longer user turns are dropped")
    min_characters: int = Field(default=12, ge=1, description="shorter user turns are dropped")
    max_characters: int = Field(default=700, ge=1, description="longer user turns are dropped")
    languages: tuple[str, ...] = Field(default=(), strict=False, description="languages to keep; [] = all")


class Servers(Section):
    """OpenAI-compatible servers that answer instead of vLLM in this process."""

    urls: tuple[str, ...] = Field(
        default=(), strict=False, description="base URLs, such as [http://host:8000/v1]; [] = vLLM on this machine"
    )
    model: str | None = Field(default=None, description="name the servers know the target by; null = their only one")
    concurrency: int = Field(default=32, gt=0, description="requests in flight per server")
    timeout_s: Positive = Field(default=600.0, description="seconds after which a request counts as failed")
    retries: int = Field(default=5, ge=0, description="further attempts of a failed request")
    dead_after_s: Positive = Field(default=300.0, description="seconds without any working server after which to stop")
    api_key_variable: str | None = Field(default=None, description="environment variable that holds the API key")

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url} is no URL; write for example http://localhost:8000/v1")
        return urls


class Generation(Section):
    """How the target answers (only with data.regenerate)."""

    seed: int = Field(default=0, ge=0, description="seed of sampling")
    temperature: Temperature | Annotated[tuple[Temperature, ...], Field(strict=False, min_length=1)] = Field(
        default=0.7, description="of training answers; 0 = greedy; a list is mixed evenly over conversations"
    )
    heldout_temperature: Temperature = Field(
        default=0.0, description="of held-out answers; 0 = greedy, as they are scored"
    )
    top_p: Number = Field(default=1.0, gt=0, le=1, description="least set of tokens with this probability; 1 = all")
    top_k: int | None = Field(default=None, gt=0, description="so many likeliest tokens; null = all")
    min_p: Number = Field(default=0.02, ge=0, lt=1, description="least share of the likeliest token's probability")
    max_tokens: int = Field(default=256, gt=0, description="longest answer, in tokens")
    truncated: Literal["keep", "drop"] = Field(default="keep", description="answers cut at max_tokens")
    max_repeated_8gram_share: Number = Field(
        default=0.3, gt=0, le=1, description="answers above it are dropped as loops"
    )
    follow_ups: int = Field(default=0, ge=0, description="further turns the target adds to its self-written prompts")
    dtype: DType | None = Field(default=None, description="of vLLM on this machine; null = features.dtype")
    max_model_len: int | None = Field(
        default=None, gt=0, description="longest prompt plus answer; null = score.max_model_len"
    )
    batch_size: int = Field(default=64, gt=0, description="sequences vLLM decodes at a time on this machine")
    tensor_parallel_size: int = Field(default=1, gt=0, description="GPUs that vLLM splits the target over")
    gpu_memory_utilization: Number = Field(
        default=0.85, gt=0, le=1, description="share of GPU memory that vLLM may take on this machine"
    )
    keep_states: bool = Field(
        default=False, description="store the hidden states of the same pass, so that extraction costs nothing extra"
    )
    servers: Servers = Field(default=Servers(), description="answer by HTTP instead")

    @model_validator(mode="after")
    def _check_states(self) -> Self:
        if self.keep_states and self.servers.urls:
            raise ValueError("keep_states: servers send tokens only; set it to false or remove the URLs")
        return self


class Data(Section):
    """The conversations that a head learns from."""

    conversations: str | None = Field(
        default=None, description="one conversation file, or builtin:FILE: the short form of sources"
    )
    sources: tuple[Source, ...] = Field(default=(), strict=False, description="where conversations come from")
    self_prompts: SelfPrompts = Field(default=SelfPrompts(), description="user turns the target writes")
    when_exhausted: Literal["stop", "continue"] = Field(
        default="stop", description="a weighted source ends: stop and keep the shares, or go on with the others"
    )
    max_conversations: int | None = Field(default=None, gt=0, description="conversations of all sources at most")
    filters: Filters = Field(default=Filters(), description="what is left out")
    near_duplicates: Number | None = Field(
        default=None,
        ge=0.5,
        le=1,
        description="Jaccard similarity of prompts from which the later one is dropped; null = exact only",
    )
    guard: Guard = Field(default=Guard(), description="keeps evaluation prompts out of training")
    heldout_share: Number = Field(
        default=0.02, gt=0, lt=1, description="of prompts, by hash, unless records say their split"
    )
    max_heldout: int | None = Field(default=1000, gt=0, description="held-out conversations at most; null = all")
    template_options: dict[str, bool | int | str] = Field(
        default_factory=dict, description="given to the chat template, such as {enable_thinking: false}"
    )
    max_length: int = Field(default=512, ge=MIN_MAX_LENGTH, description="tokens of a conversation at most")
    too_long: Literal["cut", "drop"] = Field(default="cut", description="what happens to longer conversations")
    max_train_tokens: int | None = Field(
        default=None,
        gt=0,
        description="tokens to train on, and no more to answer with regenerate; null = all there are",
    )
    on_bad_line: Literal["stop", "skip"] = Field(
        default="stop", description="a broken record ends the run, or is counted and left out"
    )
    regenerate: bool = Field(default=False, description="the target answers every assistant turn anew")
    generation: Generation = Field(default=Generation(), description="settings of data.regenerate")

    @property
    def all_sources(self) -> tuple[Source, ...]:
        """`sources`, or the one that `conversations` is short for."""
        return self.sources if self.conversations is None else (Source(path=self.conversations),)

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.conversations == "":
            raise ValueError("conversations: empty; name a .jsonl or .jsonl.gz file, or builtin:FILE")
        if self.conversations is not None and self.sources:
            raise ValueError("conversations: is the short form of sources; keep one of the two")
        if self.conversations is None and not self.sources and not self.self_prompts.count:
            raise ValueError("conversations: missing; name a file, list data.sources, or set data.self_prompts.count")
        if self.self_prompts.count and not self.regenerate:
            raise ValueError("self_prompts.count: these prompts have no answers; set data.regenerate to true as well")
        if self.generation.follow_ups and not self.self_prompts.count:
            raise ValueError("generation.follow_ups: only self-written prompts are continued; set self_prompts.count")
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        weights = [source.weight is not None for source in self.sources]
        if any(weights) and not all(weights):
            raise ValueError("sources: some have a weight and some have none; give all of them one, or none")
        return self
