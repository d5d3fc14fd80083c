"""What a run will take, by arithmetic, before anything is spent: bytes on disk, memory per device, FLOPs and hours.

Every formula is a function of counts. FLOPs count a multiply-add as two; a backward pass costs twice its forward.
Hours are FLOPs over the peak of the hardware times an assumed share, which is printed beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.heads.target import DTYPES
from eyas.recipes.hardware import Hardware
from eyas.recipes.target_size import TargetSize

TRAINED_BYTES = 16
"""Bytes per trained parameter: fp32 weight, gradient and AdamW's two moments."""

EXTRACT_SHARE = 0.5
TRAIN_SHARE = 0.25
GENERATE_SHARE = 0.5
"""Shares of the hardware's peak (of its bandwidth, for decoding) that the hours assume."""

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of all conversations, and those of them that the target wrote."""

    total: int
    answers: int

    @property
    def answer_share(self) -> float:
        return self.answers / self.total if self.total else 0.0


@dataclass(frozen=True, kw_only=True)
class HeadSize:
    """Parameters of a head by what pays for them: `slots` every token, `rows` every trained row, `readout` its lm_head."""

    slots: int
    rows: int
    readout: int

    @property
    def total(self) -> int:
        return self.slots + self.rows + self.readout


def checkpoint_bytes(parameters: int, *, kept: int, averages: bool) -> int:
    """Disk of training: the checkpoints kept and the one being written (fp32 weight, two moments, perhaps an average),
    each with the best head of its time, and the final head."""
    return parameters * ((kept + 1) * (20 if averages else 16) + 4)


def extraction_flops(tokens: Tokens, *, target: TargetSize, mean_length: float) -> float:
    """FLOPs of one forward pass over all tokens, without the lm_head."""
    products = 2.0 * target.active_parameters
    # A token attends to half of its conversation on average: scores and weighted values.
    attention = 4.0 * target.num_layers * target.num_heads * target.head_dim * mean_length / 2
    return tokens.total * (products + attention)


def teacher_flops(tokens: Tokens, *, target: TargetSize) -> float:
    """FLOPs of the full lm_head at every answer position, which a top-k teacher needs once."""
    return 2.0 * tokens.answers * target.vocab_size * target.hidden_size


def training_flops(
    tokens: Tokens, *, head: HeadSize, target: TargetSize, draft_vocab: int, epochs: int, mean_steps: float
) -> float:
    """FLOPs of training with trained-slot gathering: prompts pay for keys and values only."""
    readout = draft_vocab * target.hidden_size
    per_token = 6.0 * head.slots
    per_answer = mean_steps * 6.0 * (head.rows + readout) + 2.0 * readout  # and the teacher's distribution once
    return epochs * (tokens.total * per_token + tokens.answers * per_answer)


def cached_bytes(target: TargetSize, *, dtype: str) -> int:
    """Bytes of a token's keys and values in all layers, each taken to attend to everything before it."""
    return 2 * target.num_layers * target.num_kv_heads * target.head_dim * DTYPES[dtype].itemsize


def decoding_batch(
    tokens: Tokens,
    *,
    target: TargetSize,
    dtype: str,
    mean_length: float,
    batch_size: int,
    room: float,
) -> tuple[float, float]:
    """Sequences that an engine decodes at a time, at most `batch_size`, and the bytes that each reads in a step.

    Args:
        room: bytes of memory that the engine has for weights, keys and values, on all its devices.
    """
    context = mean_length * (1 - tokens.answer_share / 2)  # of an answer's middle, the prompts before it
    each = context * cached_bytes(target, dtype=dtype)
    fitting = (room - target.served_bytes(dtype)) // each
    return min(batch_size, max(1.0, fitting)), each


def generation_seconds(
    tokens: Tokens,
    *,
    target: TargetSize,
    dtype: str,
    mean_length: float,
    batch_size: int,
    hardware: Hardware,
    devices: int,
    memory_share: float,
) -> float:
    """Seconds in which one engine on `devices` devices writes all answers.

    A step of decoding reads all weights, and the keys and values of its batch, or computes, whichever takes longer. What
    is no answer is computed once: the prefix cache is taken to keep it between the turns of a conversation.
    """
    room = devices * hardware.memory * memory_share
    running, each = decoding_batch(
        tokens, target=target, dtype=dtype, mean_length=mean_length, batch_size=batch_size, room=room
    )
    bandwidth, flops = devices * hardware.bandwidth, devices * hardware.flops
    read = (target.served_bytes(dtype) + running * each) / (bandwidth * GENERATE_SHARE)
    compute = running * 2.0 * target.active_parameters / (flops * GENERATE_SHARE)
    prompts = (tokens.total - tokens.answers) * 2.0 * target.active_parameters / (flops * EXTRACT_SHARE)
    return tokens.answers / running * max(read, compute) + prompts


def extraction_memory(
    target: TargetSize, *, captured: int, batch_tokens: int, dtype: str, devices: int, spread: bool
) -> float:
    """Bytes per device: weights, the states kept of a batch, and about a dozen working copies of its hidden states."""
    weights = target.weight_bytes / (devices if spread else 1)
    return weights + batch_tokens * target.hidden_size * DTYPES[dtype].itemsize * (captured + 1 + 12)


def serving_memory(target: TargetSize, *, dtype: str, max_length: int, sequences: int, devices: int) -> float:
    """Bytes per device that vLLM needs at least: weights, and a KV cache for so many sequences of that length."""
    cached = sequences * max_length * cached_bytes(target, dtype=dtype)
    return (target.served_bytes(dtype) + cached) / devices


def vllm_memory(
    target: TargetSize, *, captured: int, dtype: str, max_length: int, batch_size: int, devices: int
) -> float:
    """As `serving_memory`, with the captured states of `batch_size` conversations beside it on every device."""
    states = batch_size * max_length * (captured + 1) * target.hidden_size * DTYPES[dtype].itemsize
    served = serving_memory(target, dtype=dtype, max_length=max_length, sequences=batch_size, devices=devices)
    return served + states


def training_memory(
    parameters: int,
    *,
    target: TargetSize,
    captured: int,
    pack_tokens: int,
    answer_share: float,
    steps: int,
    draft_vocab: int,
) -> float:
    """Bytes per device: trained state, the target's lm_head rows of the draft vocabulary, and roughly the activations of
    a pack. The target's embedding stays in the node's memory, once for all processes."""
    state = parameters * TRAINED_BYTES + draft_vocab * target.hidden_size * 4
    rows = pack_tokens * answer_share * steps
    activations = 4 * target.hidden_size * (pack_tokens * (captured + 4) + rows * 24)
    chunk = 4 * 512 * draft_vocab * 4
    return state + activations + chunk


def hours(flops: float, *, hardware: Hardware, devices: int, share: float) -> float:
    """Hours of `flops` at `share` of the peak of `devices` devices."""
    return flops / (hardware.flops * share * devices) / HOUR
