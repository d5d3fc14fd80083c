"""Hidden states out of real vLLM against transformers': extraction into the store, and one pass with generation.

All engines of one process start in `_serve`, this module run as a program: importing vLLM costs ten seconds, an engine one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from eyas.heads.files import read_json, write_json
from eyas.heads.serving import engine_environment
from eyas.heads.target import HiddenStateCapture, load_target_model
from eyas.train.data.prepare import prepare
from eyas.train.data.tokens import SPLITS, Tokens
from eyas.train.features import extract as extract_module
from eyas.train.features import vllm_extract
from eyas.train.features.encoding import StoreForm
from eyas.train.features.extract import extract, planned_identity
from eyas.train.features.generated import GeneratedStates
from eyas.train.features.shards import ShardWriter, claim
from eyas.train.features.states import (
    allow_min_p,
    drain,
    flush_states,
    generation_states_settings,
    keep_states,
    load_final_norm,
    open_writer,
    states_arguments,
)
from eyas.train.features.store import FeatureStore
from eyas.train.features.vllm_extract import _last_error, extract_vllm
from tests import tiny

NUM_LAYERS = 4
MAX_ERROR = 1e-5
"""Of float32 rounding; a wrong layer, norm or mask is off by tenths."""
FORMS = {
    "float32": StoreForm(storage="float32", teacher="hidden", teacher_k=0, last_everywhere=False),
    "eagle": StoreForm(storage="float32", teacher="hidden", teacher_k=0, last_everywhere=True),
    "fp8 top-k": StoreForm(storage="fp8", teacher="top-k", teacher_k=8, last_everywhere=False),
}
CASES: dict[str, dict[str, Any]] = {
    # 48 tokens a forward pass, and documents of up to 150: most are read in pieces. Layer 4 is the last one.
    "llama": {"target": "llama", "form": "float32", "layers": (1, 2, NUM_LAYERS), "batch_tokens": 48},
    "qwen3": {"target": "qwen3", "form": "float32", "layers": (1, 2, 3), "batch_tokens": 256},
    "mixture of experts": {"target": "moe", "form": "float32", "layers": (1, 2, 3), "batch_tokens": 256},
    # Layers that see the last 16 tokens between layers that see all, and attention sinks.
    # Its activation rounds more: up to 1.2e-5 is left.
    "gpt-oss": {
        "target": "gpt-oss",
        "form": "float32",
        "layers": (1, 2, NUM_LAYERS),
        "batch_tokens": 48,
        "max_error": 2e-5,
    },
    "eagle": {"target": "llama", "form": "eagle", "layers": (), "batch_tokens": 256},
    "fp8 top-k": {
        "target": "llama",
        "form": "fp8 top-k",
        "layers": (1, 2, 3),
        "batch_tokens": 256,
        "max_error": 0.005,
    },
}
REQUESTS = 14
GENERATION_LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which `_serve` has run every case, each in `vllm-NAME`, with the targets and tokens they used."""
    root = tmp_path_factory.mktemp("vllm-extract")
    tiny.write_target(root / "llama", num_layers=NUM_LAYERS)
    _write_qwen3(root / "qwen3", moe=False)
    _write_qwen3(root / "moe", moe=True)
    _write_gpt_oss(root / "gpt-oss")
    prepare(
        root / "tokens",
        target_dir=root / "llama",
        conversations=_write_conversations(root / "c.jsonl"),
        max_length=150,
        too_long="cut",
        max_train_tokens=None,
        on_bad_line="stop",
        trust_remote_code=False,
        template_options={},
        seed=0,
    )
    with (root / "engine.log").open("w") as log:
        code = subprocess.run(
            [sys.executable, "-m", "tests.test_train_vllm_extract_engine", str(root)],
            cwd=Path(__file__).parents[1],
            env=engine_environment(threads=1, kv_cache_gib=1),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=600,
            check=False,
        ).returncode
    assert code == 0, (root / "engine.log").read_text()[-4000:]
    return root


def _write_conversations(path: Path) -> Path:
    rows = []
    for index in range(28):
        word = "abcdefgh"[index % 8]
        turns = [f"say {word} {index}", f"{word}{word} " * (1 + index * 7 % 31)]
        rows.append(
            {
                "id": f"row-{index}",
                "split": "heldout" if index % 7 == 6 else "train",
                "messages": [
                    {"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(turns)
                ],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SHAPE: dict[str, Any] = {
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def _write_qwen3(directory: Path, *, moe: bool) -> None:
    torch.manual_seed(1)
    if moe:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
        _write(directory, Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts)))
    else:
        _write(directory, Qwen3ForCausalLM(Qwen3Config(**SHAPE)))


def _write_gpt_oss(directory: Path) -> None:
    torch.manual_seed(1)
    model: Any = GptOssForCausalLM(GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=16))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    _write(directory, model)


def _write(directory: Path, model: Any) -> None:
    # Weights of the norm that are all ones would hide a norm that ignores them.
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.save_pretrained(directory)
    tiny.write_tokenizer(directory)


def _extract_hf(out_dir: Path, *, root: Path, case: dict[str, Any]) -> None:
    extract(
        out_dir,
        tokens_dir=root / "tokens",
        target_dir=root / case["target"],
        capture_layers=case["layers"],
        dtype="float32",
        form=FORMS[case["form"]],
        batch_tokens=case["batch_tokens"],
        threads=None,
        device_map=None,
        trust_remote_code=False,
        generated_states=None,
    )


def _small_shards() -> None:
    extract_module.SHARD_BYTES, extract_module.BATCHES_PER_SHARD = 1 << 16, 1


def relative_error(ours_RX: Tensor, theirs_RX: Tensor) -> float:
    """Greatest over rows of |ours - theirs| / |theirs|; a row is one layer of one token."""
    ours, theirs = (states.float().reshape(-1, 64) for states in (ours_RX, theirs_RX))
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-9)).max())


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_the_store_is_that_of_transformers(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract_module, "SHARD_BYTES", 1 << 16)
    monkeypatch.setattr(extract_module, "BATCHES_PER_SHARD", 1)
    _extract_hf(tmp_path, root=made, case=CASES[name])
    store = made / f"vllm-{name}"
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert sorted(path.name for path in store.glob("*.safetensors")) == shards and len(shards) > 3
    assert (store / "index.json").read_bytes() == (tmp_path / "index.json").read_bytes()
    errors: list[float] = []
    for split in SPLITS:
        ours, theirs = (FeatureStore(directory, split=split, verify="open") for directory in (store, tmp_path))
        assert ours.lengths == theirs.lengths and not ours.missing()
        for index in range(len(ours)):
            mine, other = ours.load_encoded(index).tensors, theirs.load_encoded(index).tensors
            assert torch.equal(mine["token_ids"], other["token_ids"])
            assert torch.equal(mine["answer_mask"], other["answer_mask"])
            if CASES[name]["form"] == "fp8 top-k":
                same = mine["captured"].view(torch.uint8) == other["captured"].view(torch.uint8)
                errors.append(1 - float(same.float().mean()))  # a code differs where rounding errors meet a border
                close = (mine["teacher_log_probs"] - other["teacher_log_probs"]).abs()
                assert torch.equal(mine["teacher_ids"][:, 0], other["teacher_ids"][:, 0]) and close.max() < 0.01
            else:
                states = {"captured", "last", "teacher"} & mine.keys()
                assert len(states) == (1 if name == "eagle" else 2)
                errors += [relative_error(mine[tensor], other[tensor]) for tensor in states]
    assert max(errors) < CASES[name].get("max_error", MAX_ERROR)
    print(f"{name}: {max(errors):.1e}")


@pytest.mark.engine
def test_what_the_writer_raises_ends_the_engine_and_a_second_run_goes_on_after_the_shards(made: Path) -> None:
    result = read_json(made / "stopped.json")
    assert result["error"] == "ValueError: no space for the third shard"
    assert len(result["before"]) == 2
    assert {name: result["after"][name] for name in result["before"]} == result["before"]
    whole = sorted(path.name for path in (made / "vllm-llama").glob("*.safetensors"))
    assert sorted(result["after"]) == whole


@pytest.mark.engine
def test_a_shard_that_another_process_is_at_is_waited_for_at_the_end(made: Path) -> None:
    result = read_json(made / "beside.json")
    theirs = result["theirs"]
    assert set(result["after"]) - set(result["before"]) == {theirs}
    assert result["after"][theirs] == _stamps(made / "vllm-llama")[theirs], "made a second time"
    assert sorted(result["after"]) == sorted(_stamps(made / "vllm-llama"))


@pytest.mark.engine
def test_documents_that_generation_met_are_taken_from_there(made: Path, tmp_path: Path) -> None:
    result = read_json(made / "taken.json")
    _extract_hf(tmp_path, root=made, case={**CASES["llama"], "layers": GENERATION_LAYERS})
    assert result["counts"]["from_generation"] == result["kept"] > 5
    for split in SPLITS:
        ours, theirs = (FeatureStore(store, split=split) for store in (made / "taken", tmp_path))
        assert ours.lengths == theirs.lengths and not ours.missing()
        for mine, other in zip(ours.load(range(len(ours))), theirs.load(range(len(ours))), strict=True):
            assert torch.equal(mine.answer_mask_T, other.answer_mask_T)
            assert relative_error(mine.captured_TX, other.captured_TX) < MAX_ERROR
            assert relative_error(mine.teacher.hidden_PH, other.teacher.hidden_PH) < MAX_ERROR  # type: ignore[union-attr]


@pytest.mark.engine
def test_keeping_states_changes_no_answer(made: Path) -> None:
    alone, kept = read_json(made / "alone.json"), read_json(made / "kept.json")
    assert kept["answers"] == alone["answers"]
    assert len({tuple(answer) for answer in alone["answers"].values()}) > REQUESTS // 2
    assert alone["preempted"] == 0 and kept["preempted"] > 0


@pytest.mark.engine
def test_states_of_generation_are_those_of_a_separate_pass(made: Path) -> None:
    """Of prompt and answer, for the requests that asked for it, though the small cache preempted some of them."""
    identity = planned_identity(
        made / "llama",
        tokens_dir=made / "tokens",
        capture_layers=GENERATION_LAYERS,
        dtype="float32",
        form=FORMS["float32"],
        trust_remote_code=False,
    )
    generated = GeneratedStates(made / "states", identity=identity)
    capture = HiddenStateCapture(
        load_target_model(made / "llama", dtype=torch.float32), capture_layers=GENERATION_LAYERS
    )
    answers = read_json(made / "kept.json")["answers"]
    for request in _requests():
        token_ids_T = torch.tensor(request["prompt"] + answers[request["id"]])
        answer_mask_T = torch.arange(len(token_ids_T)) >= len(request["prompt"])
        document = generated.find(token_ids_T, answer_mask_T)
        assert (document is not None) == request["last"]
        if document is None:
            continue
        captured_BTX, last_BTH = capture(token_ids_T[None])
        tensors = document.tensors
        assert relative_error(tensors["captured"][:-1], captured_BTX[0, :-1]) < MAX_ERROR
        assert not tensors["captured"][-1].any(), "the last token was never an input"
        positions_P = torch.arange(len(request["prompt"]), len(token_ids_T) - 1)
        assert relative_error(tensors["teacher"], last_BTH[0, positions_P]) < MAX_ERROR


@pytest.mark.engine
def test_an_engine_split_over_two_processes(made: Path, tmp_path: Path) -> None:
    """The whole way, with the worker's own process. Rank 0 writes, once."""
    arguments: dict[str, Any] = {
        "tokens_dir": made / "tokens",
        "target_dir": made / "qwen3",
        "capture_layers": (1, 2, 3),
        "dtype": "float32",
        "form": FORMS["float32"],
        "batch_tokens": 256,
        "batch_size": 8,
        "threads": 1,
        "kv_cache_gib": 1,
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.9,
        "trust_remote_code": False,
        "generated_states": None,
    }
    extract_vllm(tmp_path, **arguments)
    assert not list(tmp_path.glob("vllm-*"))
    for split in SPLITS:
        ours, theirs = (FeatureStore(store, split=split) for store in (tmp_path, made / "vllm-qwen3"))
        for mine, other in zip(ours.load(range(len(ours))), theirs.load(range(len(theirs))), strict=True):
            assert relative_error(mine.captured_TX, other.captured_TX) < MAX_ERROR


def test_the_final_norm_is_the_one_of_the_model_type(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**tiny.TARGET_SIZES, "head_dim": 16, "rms_norm_eps": 1e-3}
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**sizes)),
        "gemma": Gemma3ForCausalLM(Gemma3TextConfig(**sizes)),  # multiplies by 1 + weight
    }
    states_TH = torch.randn(5, 64)
    for name, model in models.items():
        torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
        model.save_pretrained(tmp_path / name)
        norm = load_final_norm(tmp_path / name, dtype=torch.float32)
        assert torch.equal(norm(states_TH), model.model.norm(states_TH))
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=96)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"features\.backend=hf"):
        load_final_norm(tmp_path / "gpt2", dtype=torch.float32)


def test_generated_states_are_numbered_on_by_a_second_worker(tmp_path: Path, tiny_target: Path) -> None:
    """What a killed worker had not written is lost, what it had is not written over."""
    settings = generation_states_settings(
        tmp_path, target_dir=tiny_target, capture_layers=(1, 6), dtype="float32", form=FORMS["float32"], shard_tokens=10
    )
    answers = [list(range(20 * n, 20 * n + 6)) for n in range(6)]
    for worker in (answers[:3], answers[3:]):
        writer = open_writer(settings, device=torch.device("cpu"))
        for token_ids in worker:
            states_SNH = torch.tensor(token_ids[:-1])[:, None, None] * torch.tensor([[[1.0], [-1.0]]]).expand(1, 2, 64)
            writer.add({"id": "x"}, token_ids=token_ids, states_SNH=states_SNH)
        if worker == answers[3:]:
            writer.add({"flush": True}, token_ids=[0, 1], states_SNH=torch.zeros(1, 2, 64))
    store = FeatureStore(tmp_path, split="generated", verify="open")
    held = [document.token_ids_T.tolist() for document in store.load(range(len(store)))]
    assert held == [answers[0], answers[1], *answers[3:]]
    tensors = store.load_encoded(2).tensors
    assert tensors["captured"].shape == (6, 2 * 64) and not tensors["captured"][-1].any()
    assert torch.equal(tensors["captured"][:-1, 0], torch.tensor(answers[3][:-1]).float())
    assert tensors["teacher"].shape == (4, 64), "every position but the first and the last"
    with pytest.raises(ValueError, match=r"set data\.generation\.dtype"):
        writer.add({"id": "x"}, token_ids=[0, 1], states_SNH=torch.zeros(1, 2, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="holds another feature store"):
        open_writer({**settings, "identity": {**settings["identity"], "dtype": "bfloat16"}}, device=torch.device("cpu"))


def test_the_message_of_a_failed_worker_is_found_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "x\nValueError: first\n(Worker_TP0 pid=1) ERROR 11-30 [a.py:1] ValueError: no space for shard 3; free some\ny\n"
    )
    assert _last_error(log) == ": no space for shard 3; free some"
    log.write_text(
        "  Value error, User-specified max_model_len (513) is greater than the derived max_model_len (512)\nx"
    )
    assert _last_error(log).startswith(": User-specified max_model_len (513)") and "data.max_length" in _last_error(log)
    log.write_text("Segmentation fault")
    assert _last_error(log) == ""


# ------------------------------------------------------------------------------------------------- the engine process


def _requests() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    requests = []
    for index in range(REQUESTS):
        length = 20 + index * 37 % 90
        prompt = torch.randint(3, tiny.VOCAB_SIZE - 70, (length,), generator=generator).tolist()
        requests.append({"id": f"conversation-{index}-0", "prompt": prompt, "last": index % 3 != 2, "seed": index})
    return requests


def _serve(root: Path) -> None:
    _small_shards()
    vllm_extract._run_worker = _extract_here  # type: ignore[assignment]
    for name, case in CASES.items():
        _extract_case(root / f"vllm-{name}", root=root, case=case)
    _stopped(root)
    _beside_another(root)
    _generate(root, "alone", {"num_gpu_blocks_override": 64})
    settings = _generation_settings(root, root / "states")
    # 12 blocks of 32 tokens for sequences of up to 150: some have to wait for others and begin again.
    small = {"num_gpu_blocks_override": 12, "block_size": 32}
    _generate(root, "kept", {**states_arguments(settings), **small})
    _taken(root)


def _extract_here(plan: dict[str, Any], *, environment: dict[str, str]) -> dict[str, int]:  # noqa: ARG001
    plan["engine"]["num_gpu_blocks_override"] = 64
    engine = vllm_extract._start_engine(plan)
    try:
        extraction = vllm_extract._Extraction(plan, engine=engine)
        extraction.run()
        return dict(extraction.counts)
    finally:
        _shut_down(engine)


def _shut_down(engine: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def _extract_case(
    out_dir: Path, *, root: Path, case: dict[str, Any], generated_states: Path | None = None
) -> dict[str, int]:
    return extract_vllm(
        out_dir,
        tokens_dir=root / "tokens",
        target_dir=root / case["target"],
        capture_layers=case["layers"],
        dtype="float32",
        form=FORMS[case["form"]],
        batch_tokens=case["batch_tokens"],
        batch_size=8,
        threads=1,
        kv_cache_gib=1,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        trust_remote_code=False,
        generated_states=generated_states,
    )


def _stopped(root: Path) -> None:
    """An extraction whose third shard cannot be written, and the one after it."""
    store = root / "stopped"
    write, result = ShardWriter.write, {}
    written: list[str] = []

    def fail_at_the_third(self: ShardWriter, name: str, documents: Any) -> Path:
        if len(written) == 2:
            raise ValueError("no space for the third shard")
        written.append(name)
        return write(self, name, documents)

    ShardWriter.write = fail_at_the_third  # type: ignore[method-assign]
    try:
        _extract_case(store, root=root, case=CASES["llama"])
    except ValueError as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    ShardWriter.write = write  # type: ignore[method-assign]
    result["before"] = _stamps(store)
    _extract_case(store, root=root, case=CASES["llama"])
    write_json(root / "stopped.json", {**result, "after": _stamps(store)})


def _beside_another(root: Path) -> None:
    """An extraction while a shard's claim is held elsewhere, by somebody who writes it when this one has nothing left."""
    store, theirs = root / "beside", sorted((root / "vllm-llama").glob("train-*"))[1]
    store.mkdir()
    shutil.copy(root / "vllm-llama" / "index.json", store)
    finish, before = vllm_extract._Extraction._finish, {}
    with ExitStack() as held:
        held.enter_context(claim(store, split="train", name=theirs.stem.removeprefix("train-")))

        def then_the_other_writes(self: Any) -> None:
            finish(self)
            if not before:
                before.update(_stamps(store))
                shutil.copy2(theirs, store)
                held.close()

        vllm_extract._Extraction._finish = then_the_other_writes  # type: ignore[method-assign]
        _extract_case(store, root=root, case=CASES["llama"])
    vllm_extract._Extraction._finish = finish  # type: ignore[method-assign]
    write_json(root / "beside.json", {"theirs": theirs.name, "before": before, "after": _stamps(store)})


def _stamps(store: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in store.glob("*.safetensors")}


def _generation_settings(root: Path, store: Path) -> dict[str, Any]:
    return generation_states_settings(
        store,
        target_dir=root / "llama",
        capture_layers=GENERATION_LAYERS,
        dtype="float32",
        form=FORMS["float32"],
        shard_tokens=300,
    )


def _engine(root: Path, arguments: dict[str, Any]) -> Any:
    from vllm import LLM

    fixed = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "skip_tokenizer_init": True}
    return LLM(str(root / "llama"), enforce_eager=True, **fixed, **arguments).llm_engine


def _generate(root: Path, name: str, arguments: dict[str, Any]) -> None:
    """Sample all answers, with or without their states."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, preempted = Scheduler._preempt_request, []

    def count(self: Any, *positional: Any, **keywords: Any) -> Any:
        preempted.append(1)
        return preempt(self, *positional, **keywords)

    Scheduler._preempt_request = count
    engine = _engine(root, arguments)
    keep = "kv_transfer_config" in arguments
    if keep:
        allow_min_p(engine)
    for request in _requests():
        parameters = SamplingParams(
            temperature=0.8,
            min_p=0.05,
            seed=request["seed"],
            max_tokens=40,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=keep_states({"id": request["id"]}) if keep and request["last"] else None,
        )
        engine.add_request(request["id"], {"prompt_token_ids": request["prompt"]}, parameters)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    if keep:
        flush_states(engine)
    Scheduler._preempt_request = preempt
    write_json(root / f"{name}.json", {"answers": answers, "preempted": len(preempted)})
    _shut_down(engine)


def _taken(root: Path) -> None:
    """An extraction beside a generation's store that holds some of the documents, each with a token more."""
    from vllm import SamplingParams

    engine = _engine(
        root, {**states_arguments(_generation_settings(root, root / "met")), "num_gpu_blocks_override": 64}
    )
    kept = 0
    for split in SPLITS:
        tokens = Tokens(root / "tokens", split=split)
        for index in range(len(tokens)):
            if index % 3 != 1 and index > 4:
                parameters = SamplingParams(max_tokens=1, detokenize=False, extra_args=keep_states({"id": str(index)}))
                engine.add_request(f"{split}-{index}", {"prompt_token_ids": tokens[index][0].tolist()}, parameters)
                kept += 1
    drain(engine)
    flush_states(engine)
    _shut_down(engine)
    case = {**CASES["llama"], "layers": GENERATION_LAYERS}
    counts = _extract_case(root / "taken", root=root, case=case, generated_states=root / "met")
    write_json(root / "taken.json", {"counts": counts, "kept": kept})


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
