"""What becomes of hidden states that leave vLLM: the layers asked for, the final norm, and the writers of shards.

vLLM's layer id k is the residual stream after k layers, as transformers counts; id L is the last layer's output before
the final norm, and the norm itself is not among the states. `StateEncoder` applies it with the very module that
transformers builds for the target's model type, so a norm of another kind (Gemma's 1 + weight) is right by construction.

Two writers use it. `DocumentWriter` fills the shards of an extraction. `GeneratedWriter` keeps the states of answers
while they are generated (one pass): it knows neither which documents will be made of them nor their masks, so it stores
every slot, with the teacher at every position, under the tokens themselves; extraction then looks documents up by their
tokens. The last token of an answer has no state, since it was never an input. No loss needs one: a slot's label is the
token after it.

Shapes: T tokens of a document, S of them with a state, N layers asked for, H hidden, A captured layers, X = A*H.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.heads.config import default_capture_layers, load_target_config
from eyas.heads.target import DTYPES, TargetWeights, load_target_pieces
from eyas.heads.target_source import target_fingerprint
from eyas.train.data.tokens import SPLITS, Tokens
from eyas.train.features.encoding import DocumentEncoder, EncodedDocument, StoreForm
from eyas.train.features.generated import SPLIT as GENERATED_SPLIT
from eyas.train.features.identity import StoreIdentity, open_index
from eyas.train.features.shards import ShardWriter, shard_name
from eyas.train.features.store import FeatureStore

GENERATED_DOCUMENTS: dict[str, int | None] = {GENERATED_SPLIT: None}
GENERATED_TOKENS = "generated"
GENERATED_SHARD_TOKENS = 1 << 15


def engine_layer_ids(capture_layers: Sequence[int], *, num_layers: int) -> list[int]:
    """Layer ids to ask vLLM for: the captured ones and the last. vLLM sorts them and drops repeated ones."""
    return sorted({*capture_layers, num_layers})


def load_final_norm(target_dir: Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
    """The target's final norm as the module that transformers builds for its model type, with the target's weights.

    Raises:
        ValueError: the decoder has no module called `norm`, so nothing says what its last state is.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(target_dir, local_files_only=True, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    norm = dict(model.get_decoder().named_children()).get("norm")
    if norm is None:
        raise ValueError(
            f"the target {target_dir} has no final norm called `norm` in its decoder, so states out of vLLM cannot be "
            "completed; set features.backend=hf"
        )
    weights = TargetWeights(target_dir)
    norm = norm.to_empty(device="cpu")
    norm.load_state_dict({name: weights.require(f"model.norm.{name}") for name in norm.state_dict()})
    return norm.to(dtype).eval().requires_grad_(False)


class StateEncoder:
    """Encodes what vLLM hands over of one document as the store keeps it, on the device where the states are."""

    def __init__(
        self, target_dir: Path, *, identity: StoreIdentity, device: torch.device, trust_remote_code: bool = False
    ) -> None:
        layer_ids = engine_layer_ids(identity.capture_layers, num_layers=identity.num_target_layers)
        self._columns = [layer_ids.index(layer) for layer in identity.capture_layers]
        self._dtype = dtype = DTYPES[identity.dtype]
        self._norm = load_final_norm(target_dir, dtype=dtype, trust_remote_code=trust_remote_code).to(device)
        readout_VH = None
        if identity.form.teacher == "top-k":
            readout_VH = load_target_pieces(target_dir).readout_VH.to(device)
        self._encoder = DocumentEncoder(identity.form, num_layers=len(self._columns), readout_VH=readout_VH)

    @torch.inference_mode()
    def encode(self, token_ids_T: Tensor, *, answer_mask_T: Tensor, states_SNH: Tensor, name: str) -> EncodedDocument:
        """Encode a document of T tokens from its first S states; tokens without a state get zeros.

        Args:
            name: of the document, for errors.

        Raises:
            ValueError: the engine runs in another type than the store says.
        """
        if states_SNH.dtype != self._dtype:
            raise ValueError(
                f"the engine runs in {states_SNH.dtype}, and the states are to be those of {self._dtype}; set "
                "data.generation.dtype to features.dtype, or data.generation.keep_states=false"
            )
        missing = token_ids_T.shape[0] - states_SNH.shape[0]
        assert missing >= 0, "more states than tokens"
        captured_SX = states_SNH[:, self._columns].flatten(1)
        last_SH = self._norm(states_SNH[:, -1])
        return self._encoder.encode(
            token_ids_T,
            answer_mask_T=answer_mask_T,
            captured_TX=functional.pad(captured_SX, (0, 0, 0, missing)),
            last_TH=functional.pad(last_SH, (0, 0, 0, missing)),
            name=name,
        )


class StateWriter(Protocol):
    """Takes the states of finished requests, in the process that holds them."""

    def add(self, document: Mapping[str, Any], *, token_ids: list[int], states_SNH: Tensor) -> None:
        """Take one request.

        Args:
            document: what its sender said it is.
            token_ids: prompt and completion. states_SNH: of all of them but the last.
        """
        ...


def open_writer(settings: Mapping[str, Any], *, device: torch.device) -> StateWriter:
    """The writer that a connector's settings describe (`generation_states_settings`, or an extraction's)."""
    identity = StoreIdentity.from_json(settings["identity"])
    encoder = StateEncoder(
        Path(settings["target_dir"]),
        identity=identity,
        device=device,
        trust_remote_code=settings["trust_remote_code"],
    )
    store = Path(settings["store"])
    if settings["writer"] == "generated":
        return GeneratedWriter(store, identity=identity, encoder=encoder, shard_tokens=settings["shard_tokens"])
    return DocumentWriter(store, identity=identity, encoder=encoder, tokens_dir=Path(settings["tokens_dir"]))


class DocumentWriter:
    """Fills the shards of an extraction: a shard is written when its last document has come."""

    def __init__(self, store: Path, *, identity: StoreIdentity, encoder: StateEncoder, tokens_dir: Path) -> None:
        self._encoder = encoder
        self._tokens = {split: Tokens(tokens_dir, split=split) for split in SPLITS}
        self._writers = {split: ShardWriter(store, identity=identity, split=split) for split in SPLITS}
        self._come: dict[tuple[str, str], list[tuple[int, EncodedDocument]]] = {}

    def add(self, document: Mapping[str, Any], *, token_ids: list[int], states_SNH: Tensor) -> None:
        """Take a document of a shard: `document` has "split", "shard", "index" and "of", the shard's documents."""
        split, index = document["split"], document["index"]
        tokens = self._tokens[split]
        token_ids_T, answer_mask_T = tokens[index]
        assert token_ids[:-1] == token_ids_T.tolist(), "the engine answered another document"
        encoded = self._encoder.encode(
            token_ids_T, answer_mask_T=answer_mask_T, states_SNH=states_SNH, name=tokens.ids(index)
        )
        come = self._come.setdefault((split, document["shard"]), [])
        come.append((index, encoded))
        if len(come) == document["of"]:
            come.sort(key=lambda pair: pair[0])
            self._writers[split].write(document["shard"], self._come.pop((split, document["shard"])))


class GeneratedWriter:
    """Keeps the states of answers as they are generated, in shards of `shard_tokens` tokens or what a flush leaves."""

    def __init__(self, store: Path, *, identity: StoreIdentity, encoder: StateEncoder, shard_tokens: int) -> None:
        open_index(store, identity, documents=GENERATED_DOCUMENTS)
        self._encoder, self._shard_tokens = encoder, shard_tokens
        self._writer = ShardWriter(store, identity=identity, split=GENERATED_SPLIT)
        self._next = len(FeatureStore(store, split=GENERATED_SPLIT))
        self._kept: list[tuple[int, EncodedDocument]] = []

    def add(self, document: Mapping[str, Any], *, token_ids: list[int], states_SNH: Tensor) -> None:
        """Take an answer with its prompt, or write what there is when `document` has "flush"."""
        if not document.get("flush"):
            token_ids_T = torch.tensor(token_ids)
            encoded = self._encoder.encode(
                token_ids_T,
                answer_mask_T=torch.ones_like(token_ids_T, dtype=torch.bool),
                states_SNH=states_SNH,
                name=document["id"],
            )
            self._kept.append((self._next, encoded))
            self._next += 1
        if document.get("flush") or sum(kept.num_tokens for _, kept in self._kept) >= self._shard_tokens:
            self._write()

    def _write(self) -> None:
        if self._kept:
            self._writer.write(shard_name([index for index, _ in self._kept]), self._kept)
            self._kept = []


def generation_states_settings(
    store: Path,
    *,
    target_dir: Path,
    capture_layers: Sequence[int] | None,
    dtype: str,
    form: StoreForm,
    shard_tokens: int = GENERATED_SHARD_TOKENS,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """What an engine that answers needs to keep the states of its answers in `store`, as JSON.

    Args:
        capture_layers: as in extraction, None for the default ones. dtype: of the engine's forward.
        form: of the store that training will read.
        shard_tokens: tokens of a shard. A kill loses the states, not the answers, of what is not in one.
    """
    config = load_target_config(target_dir, trust_remote_code=trust_remote_code)
    identity = StoreIdentity(
        target_fingerprint=target_fingerprint(target_dir),
        tokens_fingerprint=GENERATED_TOKENS,
        hidden_size=config.hidden_size,
        num_target_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        capture_layers=tuple(
            default_capture_layers(config.num_hidden_layers) if capture_layers is None else capture_layers
        ),
        dtype=dtype,
        form=form,
    )
    return {
        "writer": "generated",
        "store": str(store),
        "target_dir": str(target_dir),
        "identity": identity.as_json(),
        "shard_tokens": shard_tokens,
        "trust_remote_code": trust_remote_code,
    }


def states_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` with which an engine hands the states of its requests to the writer of `settings`."""
    identity = StoreIdentity.from_json(settings["identity"])
    layer_ids = engine_layer_ids(identity.capture_layers, num_layers=identity.num_target_layers)
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "eyas.train.features.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": dict(settings),
        },
        "scheduler_cls": "eyas.train.features.connector.OneTokenScheduler",
        "async_scheduling": False,
        "worker_extension_cls": "eyas.train.features.connector.StatesWorker",
        # A prefix that is found in the cache is not computed; what is written must not depend on what ran before.
        "enable_prefix_caching": False,
    }


def keep_states(document: Mapping[str, Any]) -> dict[str, Any]:
    """`extra_args` of the sampling parameters of a request whose states are kept."""
    return {"kv_transfer_params": {"document": dict(document)}}


def allow_min_p(engine: Any) -> None:
    """Let requests of an engine that keeps states use min_p; called once, after its start.

    vLLM has no min_p beside a speculative method, because drafts are checked without it. Here no draft is ever checked.
    """
    engine.collective_rpc("sample_with_min_p")
    engine.input_processor.speculative_config = None  # which is read for nothing but refusing such requests


def drain(engine: Any) -> None:
    """Run the engine's last steps, in which finished requests are handed over.

    A request's states are read in the step after its end, and an engine that runs in the caller's process makes that
    step only when it is asked to.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    while scheduler.has_requests():
        engine.step()


def flush_states(engine: Any) -> None:
    """Write the states of all answers so far; called when nothing is running, by whoever added the requests."""
    from vllm import SamplingParams

    drain(engine)
    parameters = SamplingParams(max_tokens=1, detokenize=False, extra_args=keep_states({"flush": True}))
    engine.add_request("flush-states", {"prompt_token_ids": [0]}, parameters)
    drain(engine)
