"""L0, the measuring half: run the rejection sampler of the installed vLLM, and ours, and count what they emit.

`python -m eyas.eval.lossless.sampler ROUNDS OUT.json SESSION`, in the environment of an engine. The object under test is
`vllm.v1.sample.rejection_sampler.RejectionSampler` with the `Sampler` that draws its bonus tokens, called as the model
runner calls it (temperature scaling, softmax, acceptance, residual, bonus), on the device and with the kernels the engine
uses here: on a CPU without Triton the C++ functions that vLLM's CPU platform puts in the kernels' place.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from eyas.eval.lossless import cases
from eyas.eval.lossless.cases import Case, Counts, Rows, count, flatten, greedy_emitted, reference_cases, vllm_cases
from eyas.eval.lossless.chi_square import Ints
from eyas.eval.lossless.laws import Model, make_model
from eyas.eval.lossless.mend import mend_cpu_sampler
from eyas.eval.lossless.reference import draw_drafts
from eyas.heads.files import write_json
from eyas.heads.serving import end_with_parent, require_vllm

BATCH = 500
KERNELS = (
    "rejection_greedy_sample_kernel",
    "rejection_random_sample_kernel",
    "expand_kernel",
    "sample_recovered_tokens_kernel",
)


class VllmSampler:
    """vLLM's rejection sampler on this machine's device."""

    def __init__(self) -> None:
        import torch
        import vllm._custom_ops  # noqa: F401  (loads the C++ functions)
        from vllm.platforms import current_platform
        from vllm.v1.sample import rejection_sampler
        from vllm.v1.sample.sampler import Sampler

        current_platform.register_triton_kernel_overrides()  # as every engine's worker does first
        self.device = torch.device(current_platform.device_type)
        self.module = rejection_sampler
        self.sampler = rejection_sampler.RejectionSampler(Sampler(), device=self.device)

    def exercised(self) -> dict[str, Any]:
        """What ran, by name: class, device, and the function behind each kernel."""
        kernels = {name: vars(self.module)[name] for name in KERNELS}
        return {
            "vllm": require_vllm(),
            "class": f"{type(self.sampler).__module__}.{type(self.sampler).__name__}",
            "device": str(self.device),
            "kernels": {name: _function_name(kernel) for name, kernel in kernels.items()},
            "bonus_sampler": self.sampler.sampler.topk_topp_sampler.forward.__qualname__,
            "not_exercised": "vllm.v1.worker.gpu.spec_decode (the sampler of model runner V2), top-p, top-k, penalties",
        }

    def __call__(self, rows: Rows, case: Case, *, first_row: int, greedy_N: np.ndarray) -> Ints:
        """What each row emits, [N, K + 1], -1 where nothing. `first_row` numbers the rows' seeds."""
        import torch

        draft_probabilities = None
        if case.drafts == "sampled":
            draft_probabilities = torch.tensor(rows.draft_probabilities, dtype=torch.float32, device=self.device)
        logits = rows.logits * np.repeat(np.where(greedy_N, 1, case.temperature), rows.lengths_N + 1)[:, None]
        output = self.sampler(
            self._metadata(rows),
            draft_probabilities,
            torch.tensor(logits, dtype=torch.float32, device=self.device),
            self._sampling(case, first_row=first_row, greedy_N=greedy_N),
        )
        emitted = output.sampled_token_ids.cpu().numpy().astype(np.int64)
        short = cases.DRAFT_LENGTH + 1 - emitted.shape[1]
        return np.pad(emitted, ((0, 0), (0, short)), constant_values=-1)

    def _metadata(self, rows: Rows) -> Any:
        import torch
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        def integers(values: np.ndarray) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        return SpecDecodeMetadata(
            draft_token_ids=integers(rows.drafted),
            num_draft_tokens=rows.lengths_N.tolist(),
            cu_num_draft_tokens=integers(np.cumsum(rows.lengths_N)),
            cu_num_sampled_tokens=integers(np.cumsum(rows.lengths_N + 1)),
            target_logits_indices=integers(np.flatnonzero(~rows.is_bonus)),
            bonus_logits_indices=integers(np.flatnonzero(rows.is_bonus)),
            logits_indices=integers(np.arange(len(rows.logits))),
        )

    def _sampling(self, case: Case, *, first_row: int, greedy_N: np.ndarray) -> Any:
        import torch
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.metadata import SamplingMetadata

        rows = len(greedy_N)
        temperatures = torch.tensor(np.where(greedy_N, 0, case.temperature), dtype=torch.float32, device=self.device)
        zeros = torch.zeros(rows, device=self.device)
        generators = {}
        if case.seeded:
            generators = {row: torch.Generator(self.device).manual_seed(first_row + row) for row in range(rows)}
        return SamplingMetadata(
            temperature=None if greedy_N.all() else temperatures,
            all_greedy=bool(greedy_N.all()),
            all_random=not greedy_N.any(),
            top_p=None,
            top_k=None,
            generators=generators,
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=zeros,
            presence_penalties=zeros,
            repetition_penalties=zeros,
            output_token_ids=[[] for _ in range(rows)],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )


def _function_name(kernel: Any) -> str:
    """Module and name of what a kernel's launch runs: a platform's replacement, or the Triton kernel itself."""
    function = vars(kernel).get("_impl") or vars(kernel).get("fn") or kernel
    return f"{function.__module__}.{function.__qualname__}"


def run_vllm(sampler: VllmSampler, model: Model, case: Case, *, rounds: int, seed: int) -> Counts:
    """Counts of `rounds` verification steps of vLLM's sampler; an exception is kept as the case's outcome."""
    generator = np.random.default_rng(seed)
    chains = draw_drafts(model, case.drafts, rows=rounds, generator=generator)
    every = {"none": 0, "half": 2, "all": 1}[case.greedy]
    greedy = (np.arange(rounds) % every == 0) if every else np.zeros(rounds, dtype=bool)
    emitted = np.empty((rounds, model.draft_length + 1), dtype=np.int64)
    for first in range(0, rounds, BATCH):
        part = slice(first, first + BATCH)
        rows = flatten(model, case, chains[part])
        try:
            emitted[part] = sampler(rows, case, first_row=first, greedy_N=greedy[part])
        except Exception as error:  # whatever a foreign sampler raises is a finding, and the other cases go on
            return Counts(case, rounds, [], [], error=f"{type(error).__name__}: {error}")
    wrong = (emitted[greedy] != greedy_emitted(model, chains[greedy])).any(axis=1).sum()
    impossible = (emitted >= model.vocabulary) | (emitted < -1)
    if impossible.any() or (emitted[:, 0] < 0).any():
        return Counts(case, rounds, [], [], error=f"{int(impossible.sum())} tokens outside the vocabulary, or no token")
    if greedy.all():
        return Counts(case, rounds, [], [], greedy_rows=rounds, greedy_wrong=int(wrong))
    counted = count(model, case, emitted[~greedy], generator=generator)
    return Counts(case, counted.rounds, counted.positions, counted.pairs, int(greedy.sum()), int(wrong))


def measure(rounds: int) -> dict[str, Any]:
    """Run every case once. Seeds are fixed: the same installation gives the same counts."""
    import torch

    torch.manual_seed(0)
    model = make_model(vocabulary=cases.VOCABULARY, draft_length=cases.DRAFT_LENGTH, seed=cases.MODEL_SEED)
    sampler = VllmSampler()
    installed = _run_all(sampler, model, cases.installed_cases(), rounds=rounds)
    mends = mend_cpu_sampler()
    served = _run_all(sampler, model, vllm_cases(), rounds=rounds)
    own = [cases.run_reference(model, case, rounds=rounds, seed=seed) for seed, case in enumerate(reference_cases())]
    return {
        "rounds": rounds,
        "exercised": sampler.exercised(),
        "mends": mends,
        "model": {"target": model.target.tolist(), "draft": model.draft.tolist()},
        "as_installed": [each.to_json() for each in installed],
        "cases": [each.to_json() for each in [*served, *own]],
    }


def _run_all(sampler: VllmSampler, model: Model, chosen: list[Case], *, rounds: int) -> list[Counts]:
    return [run_vllm(sampler, model, case, rounds=rounds, seed=number) for number, case in enumerate(chosen)]


def main() -> None:
    end_with_parent()
    os.dup2(2, 1)  # whatever libraries print belongs into the log
    rounds, out, session = sys.argv[1:]
    write_json(Path(out), {"session": session, **measure(int(rounds))})


if __name__ == "__main__":
    main()
