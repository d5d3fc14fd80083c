"""Tiny real parts for tests: a random Llama with a byte-level tokenizer and a chat template, conversations, a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eyas.heads.build import build_head
from eyas.heads.chat import TargetChat
from eyas.heads.config import HeadConfig
from eyas.heads.head import DraftHead
from eyas.train.data.conversations import iterate_conversations

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320
CAPTURE_LAYERS = (1, 2, 3)
TARGET_SIZES: dict[str, int] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EAGLE: dict[str, Any] = {"kind": "eagle", "capture_layers": (), "draft_vocab_size": 100}
"""Changes that make the small head of `head_config` an EAGLE head."""
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "norms": {"norm_before_residual": True, "norm_before_fc": True},
    "qwen3": {"layer": "qwen3", "attention_bias": True},
    "layers": {"num_layers": 3, "attention_bias": True},
    "window": {"num_layers": 2, "sliding_window": 4},
    "embedding": {"own_embedding": True, "hidden_size": 48, "target_hidden_size": 32},
    "full vocabulary": {"draft_vocab_size": 100},
    "eagle": EAGLE,
    "eagle bias": {**EAGLE, "fc_bias": True, "num_layers": 2, "attention_bias": True},
}
"""Changes to `head_config` that between them touch every switch of a head."""


def teach_target(directory: Path, conversations: Path, *, steps: int = 150) -> Path:
    """A tiny target taught the answers of a conversation file for some seconds, so that there is something to draft."""
    write_target(directory, initializer_range=0.05)
    chat = TargetChat(directory)
    rows = list(iterate_conversations(conversations, on_bad_line="stop"))
    encoded = [document for row in rows for document in chat.encode_conversation(row.messages)]
    width = max(len(conversation.token_ids) for conversation in encoded)
    ids = torch.zeros(len(encoded), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, conversation in enumerate(encoded):
        length = len(conversation.token_ids)
        ids[row, :length] = torch.tensor(conversation.token_ids)
        labels[row, :length] = torch.where(torch.tensor(conversation.answer_mask), ids[row, :length], -100)
    model = LlamaForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        chosen = torch.arange(16) + 16 * step
        loss = model(input_ids=ids[chosen % len(ids)], labels=labels[chosen % len(ids)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory


def write_target(directory: Path, *, num_layers: int = 6, seed: int = 0, initializer_range: float = 0.2) -> Path:
    """A random Llama of hidden size 64 with tokenizer and template, as a Hugging Face directory that vLLM loads too."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=initializer_range,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path, *, chat_template: str = CHAT_TEMPLATE) -> None:
    """Byte-level tokenizer: 256 bytes after three special tokens, no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    fast.add_special_tokens({"additional_special_tokens": [SPECIAL[1]]})
    fast.chat_template = chat_template
    fast.save_pretrained(directory)


def write_conversation_file(path: Path, *, train: int = 24, heldout: int = 4) -> Path:
    """Short conversations with some structure to learn; ids and splits given."""
    rows = []
    for index in range(train + heldout):
        word = "abcdefgh"[index % 8]
        rows.append(
            {
                "id": f"row-{index}",
                "split": "train" if index < train else "heldout",
                "messages": [
                    {"role": "user", "content": f"say {word} {index}"},
                    {"role": "assistant", "content": f"{word}{word} " * (3 + index % 4)},
                ],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def head_config(**changes: Any) -> HeadConfig:
    """A small EAGLE-3 head with grouped-query attention; every field can be changed."""
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "target_hidden_size": changes.get("hidden_size", 32),
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
        "draft_vocab_size": 40,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
        "capture_layers": CAPTURE_LAYERS,
    }
    if changes.get("kind") == "eagle":
        fields |= {"capture_layers": (), "draft_vocab_size": changes.get("vocab_size", fields["vocab_size"])}
    return HeadConfig(**{**fields, **changes})


def random_head(config: HeadConfig, *, seed: int = 0) -> DraftHead:
    """A head with random weights everywhere, norms and biases included, and a random draft vocabulary."""
    torch.manual_seed(seed)
    target_ids_D = torch.sort(torch.randperm(config.vocab_size)[: config.draft_vocab_size]).values
    head = build_head(config, draft_to_target_D=target_ids_D)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 2 else 0.2))
            if parameter.dim() == 1 and not name.endswith(".bias"):
                parameter.add_(1.0)
    return head
