"""What `eyas plan` knows of a run, and the quantities that follow: bytes on disk, memory per device, FLOPs, hours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eyas.heads.config import DEFAULT_CAPTURED
from eyas.heads.target import DTYPES
from eyas.recipes import estimate
from eyas.recipes.estimate import HeadSize
from eyas.recipes.estimate_tokens import TokenEstimate
from eyas.recipes.feature_stage import extract_settings
from eyas.recipes.generation import generation_dtype, generation_length
from eyas.recipes.hardware import GIB, Hardware
from eyas.recipes.run import Run
from eyas.recipes.section import DType
from eyas.recipes.stage import MANIFEST, read_manifest
from eyas.recipes.store_form import store_form
from eyas.recipes.target_size import TargetSize
from eyas.recipes.train_stages import captured_layers, head_sizes
from eyas.train.features.encoding import StoreForm, bytes_per_token

TARGET_WHILE_TRAINING = "target while training"
"""What the hours of the target's passes are called where there is no stage of them."""


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """A run, its target's sizes, and the tokens of its data, where they are known."""

    run: Run
    size: TargetSize
    found: TokenEstimate | None

    @cached_property
    def captured(self) -> int:
        """Captured layers."""
        layers = captured_layers(self.run)
        return DEFAULT_CAPTURED if layers is None else len(layers)

    @cached_property
    def heads(self) -> tuple[HeadSize, HeadSize]:
        """The head at least and at most."""
        return head_sizes(self.run)

    @property
    def draft_vocab(self) -> int:
        """Draft vocabulary at most."""
        wanted = self.run.recipe.head.draft_vocab_size
        return wanted if isinstance(wanted, int) else self.size.vocab_size

    @property
    def stores_features(self) -> bool:
        """Whether hidden states are written to disk at all."""
        features = self.run.recipe.features
        return features.mode == "offline" or features.cache != "none"

    def token_bytes(self, form: StoreForm, *, everywhere: bool = False) -> float:
        """Bytes a token of a store, with the teacher at answers or `everywhere`."""
        share = 1.0 if everywhere or self.found is None else self.found.tokens.answer_share
        return bytes_per_token(form, hidden_size=self.size.hidden_size, num_layers=self.captured, answer_share=share)

    def needed_bytes(self) -> int:
        """Disk that the run still has to write, as far as it is known."""
        needed = float(self.checkpoint_bytes(self.heads[0]))
        if self.found is None or not self.stores_features or self._features_stand():
            return round(needed)
        form, tokens = store_form(self.run.recipe), self.found.tokens.total
        needed += tokens * self.token_bytes(form)
        if self.run.recipe.data.generation.keep_states:
            needed += tokens * self.token_bytes(form, everywhere=True)
        return round(needed)

    def checkpoint_bytes(self, head: HeadSize) -> int:
        """Disk that training fills with a head of that size."""
        train = self.run.recipe.train
        return estimate.checkpoint_bytes(head.total, kept=train.keep_checkpoints, averages=train.ema_decay is not None)

    def _features_stand(self) -> bool:
        directory = self.run.directory("extract")
        if self.run.recipe.features.mode == "online" or not (directory / MANIFEST).is_file():
            return False
        return read_manifest(directory)["settings"] == extract_settings(self.run)

    def generation_memory(self) -> float:
        """Bytes per device while the target answers, one conversation at a time at least: the engine queues what has no room."""
        return estimate.serving_memory(
            self.size,
            dtype=generation_dtype(self.run),
            max_length=generation_length(self.run),
            sequences=1,
            devices=self.run.recipe.data.generation.tensor_parallel_size,
        )

    def extraction_memory(self, *, devices: int) -> float:
        """Bytes per device while the target is run over the data."""
        features = self.run.recipe.features
        if features.backend == "vllm":
            return estimate.vllm_memory(
                self.size,
                captured=self.captured,
                dtype=features.dtype,
                max_length=self.run.recipe.data.max_length,
                batch_size=features.batch_size,
                devices=features.tensor_parallel_size,
            )
        return estimate.extraction_memory(
            self.size,
            captured=self.captured,
            batch_tokens=features.batch_tokens,
            dtype=features.dtype,
            devices=devices,
            spread=features.device_map == "auto",
        )

    def serving_memory(self) -> float:
        """Bytes per GPU while an engine of the measurement serves its largest batch with the head."""
        score = self.run.recipe.score
        return self._scored_memory(dtype=score.dtype, sequences=max(score.batch_sizes))

    def lossless_memory(self) -> float:
        """As `serving_memory`, of the engines whose outputs are compared, one request at a time at least."""
        return self._scored_memory(dtype=self.run.recipe.score.lossless.dtype, sequences=1)

    def cpu_serving_memory(self) -> float:
        """Bytes of an engine of the measurement on a CPU, where the recipe says how large its cache is."""
        score = self.run.recipe.score
        return self.size.served_bytes(score.dtype) + self._head_bytes(score.dtype) + score.kv_cache_gib * GIB

    def _scored_memory(self, *, dtype: DType, sequences: int) -> float:
        score = self.run.recipe.score
        target = estimate.serving_memory(
            self.size,
            dtype=dtype,
            max_length=score.max_model_len,
            sequences=sequences,
            devices=score.tensor_parallel_size,
        )
        return target + self._head_bytes(dtype)

    def _head_bytes(self, dtype: DType) -> int:
        """Bytes of the head that is served: the one that is trained, or that of `score.head` as far as it is here."""
        score = self.run.recipe.score
        if not score.draft_lengths:
            return 0
        if score.head is None:
            return self.heads[1].total * DTYPES[dtype].itemsize
        return sum(path.stat().st_size for path in Path(score.head).expanduser().glob("*.safetensors"))

    def training_memory(self) -> float:
        """Bytes per process while the head is trained; with the target, where it runs on the same device."""
        features, train = self.run.recipe.features, self.run.recipe.train
        own = estimate.training_memory(
            self.heads[1].total,
            target=self.size,
            captured=self.captured,
            pack_tokens=min(train.pack_tokens or train.batch_tokens, train.batch_tokens),
            answer_share=self.found.tokens.answer_share if self.found else 1.0,
            steps=train.ttt_steps,
            draft_vocab=self.draft_vocab,
        )
        beside = features.mode == "online" and features.device is None and features.where == "inline"
        return own + (self.extraction_memory(devices=1) if beside else 0.0)

    def extraction_flops(self) -> float:
        """FLOPs of all passes of the target over the data; none where the pass that generates keeps its states."""
        assert self.found is not None
        recipe, tokens = self.run.recipe, self.found.tokens
        if recipe.data.generation.keep_states:
            return 0.0
        flops = estimate.extraction_flops(tokens, target=self.size, mean_length=self.found.mean_length)
        if recipe.features.teacher == "top-k":
            flops += estimate.teacher_flops(tokens, target=self.size)
        again = recipe.features.mode == "online" and recipe.features.cache == "none"
        return flops * (recipe.train.epochs if again else 1)

    def training_flops(self) -> float:
        """FLOPs of all epochs, without the target's."""
        assert self.found is not None
        train = self.run.recipe.train
        return estimate.training_flops(
            self.found.tokens,
            head=self.heads[1],
            target=self.size,
            draft_vocab=self.draft_vocab,
            epochs=train.epochs,
            mean_steps=train.ttt_warmup_share + (1 - train.ttt_warmup_share) * train.ttt_steps,
        )

    def answering_engines(self, *, devices: int) -> int:
        """Engines that answer at the same time: the servers, or as many as `devices` devices have room for."""
        generation = self.run.recipe.data.generation
        return len(generation.servers.urls) or max(1, devices // generation.tensor_parallel_size)

    def extracting_tasks(self, *, devices: int) -> int:
        """Extractions that run at the same time on `devices` devices, each a part."""
        features = self.run.recipe.features
        spread = features.backend == "hf" and features.device_map == "auto"
        return 1 if spread else max(1, devices // features.tensor_parallel_size)

    def answering_hours(self, *, hardware: Hardware) -> float:
        """Hours in which one engine writes all answers."""
        assert self.found is not None
        generation = self.run.recipe.data.generation
        servers = generation.servers
        seconds = estimate.generation_seconds(
            self.found.tokens,
            target=self.size,
            dtype=generation_dtype(self.run),
            mean_length=self.found.mean_length,
            batch_size=servers.concurrency if servers.urls else generation.batch_size,
            hardware=hardware,
            devices=generation.tensor_parallel_size,
            memory_share=generation.gpu_memory_utilization,
        )
        return seconds / estimate.HOUR

    def extracting_hours(self, *, hardware: Hardware) -> float:
        """Hours in which one task makes all features, or, online, one device all passes of the target."""
        devices = self.run.recipe.features.tensor_parallel_size
        return estimate.hours(self.extraction_flops(), hardware=hardware, devices=devices, share=estimate.EXTRACT_SHARE)

    def hours(self, *, hardware: Hardware, devices: int) -> dict[str, float]:
        """Hours of each stage that is proportional to tokens, its engines and tasks all at work on `devices` devices."""
        training = estimate.hours(self.training_flops(), hardware=hardware, devices=devices, share=estimate.TRAIN_SHARE)
        passes = "extract" if self.run.recipe.features.mode == "offline" else TARGET_WHILE_TRAINING
        spent = {
            passes: self.extracting_hours(hardware=hardware) / self.extracting_tasks(devices=devices),
            "train": training,
        }
        if not self.run.recipe.data.regenerate:
            return spent
        answering = self.answering_hours(hardware=hardware) / self.answering_engines(devices=devices)
        return {"regenerate": answering, **spent}
