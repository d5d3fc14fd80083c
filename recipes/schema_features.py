"""The features section of a recipe: the target's hidden states, how they are made, kept and handed to training."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from eyas.recipes.section import DType, Number, Section, Threads

StorageName = Literal["float32", "bfloat16", "float16", "fp8"]


class Features(Section):
    """Hidden states of the target that a head sees."""

    mode: Literal["offline", "online"] = Field(
        default="offline", description="offline: extracted to disk first; online: the target runs beside the head"
    )
    backend: Literal["hf", "vllm"] = Field(default="hf", description="what runs the target when extracting")
    capture_layers: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None, strict=False, min_length=1, description="layers to capture; null = a low, a middle and a high one"
    )
    dtype: DType = Field(default="bfloat16", description="of the target's forward")
    storage: StorageName | None = Field(default=None, description="type of the stored states; null = dtype")
    teacher: Literal["hidden", "top-k"] = Field(
        default="hidden",
        description="what answer positions keep of the target's output: last state, or likeliest tokens",
    )
    teacher_k: int = Field(default=64, gt=0, description="tokens kept by teacher top-k")
    batch_tokens: int = Field(default=4096, gt=0, description="tokens of one forward")
    threads: Threads = Field(default=None, description="CPU threads; null = all cores")
    device_map: Literal["auto"] | None = Field(
        default=None, description="auto = spread a target larger than one device over all of them (backend hf)"
    )
    verify: Literal["open", "read"] = Field(
        default="read", description="check stored states all at once when training starts, or each as it is read"
    )
    batch_size: int = Field(default=64, gt=0, description="sequences at a time (backend vllm)")
    tensor_parallel_size: int = Field(default=1, gt=0, description="GPUs that vLLM splits the target over")
    gpu_memory_utilization: Number = Field(
        default=0.85, gt=0, le=1, description="share of GPU memory that vLLM may take"
    )
    where: Literal["inline", "process"] = Field(
        default="inline", description="online: in the training process, or in a process of its own that works ahead"
    )
    device: str | None = Field(
        default=None,
        description="online: device of the target, such as cuda:1; null = the head's, or for a process of its own a GPU no head uses",
    )
    cache: Literal["none", "first-epoch"] = Field(
        default="none", description="online: first-epoch stores states while it trains and reads them in later epochs"
    )

    @field_validator("capture_layers")
    @classmethod
    def _check_layers(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is not None and list(layers) != sorted(set(layers)):
            raise ValueError("layers must be distinct and ascending, for example [2, 15, 27]")
        return layers

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        online = {"where": self.where != "inline", "device": self.device is not None, "cache": self.cache != "none"}
        if self.mode == "offline":
            for key, used in online.items():
                if used:
                    raise ValueError(f"{key}: has a meaning online only; remove it or set features.mode=online")
        elif self.backend == "vllm":
            raise ValueError("backend: online the target runs in transformers; set backend=hf or features.mode=offline")
        elif self.device_map is not None:
            raise ValueError("device_map: online the target runs on one device; remove it or set features.mode=offline")
        return self

    @model_validator(mode="after")
    def _check_of_no_use(self) -> Self:
        """A setting that is not the default and would not be read is a misunderstanding."""
        unread = {
            "batch_size": self.backend == "hf" and self.batch_size != 64,
            "gpu_memory_utilization": self.backend == "hf" and self.gpu_memory_utilization != 0.85,
            "verify": self.mode == "online" and self.verify != "read",
            "threads": self.mode == "online" and self.where == "inline" and self.threads is not None,
        }
        reasons = {"verify": "online nothing is read from disk", "threads": "inline the target has train.threads"}
        for key, unused in unread.items():
            if unused:
                raise ValueError(f"{key}: {reasons.get(key, 'is for backend vllm')}; remove it")
        return self

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.backend == "vllm" and self.device_map is not None:
            raise ValueError("device_map: is for backend hf; vLLM splits a target by tensor_parallel_size")
        if self.backend == "hf" and self.tensor_parallel_size != 1:
            raise ValueError(
                "tensor_parallel_size: is for backend vllm; backend hf spreads a target by device_map=auto"
            )
        return self

    @property
    def stored_as(self) -> StorageName:
        """Type of the stored states, with the default filled in."""
        return self.dtype if self.storage is None else self.storage
