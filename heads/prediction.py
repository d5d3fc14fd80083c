"""What the server will accept, predicted offline from the target's own hidden states.

Given a text that the target wrote greedily, run the target once over it (transformers), draft from every slot with the
head, and walk the text as the server does. Held against the engine's counters this is the test that a head drafts in
vLLM exactly what training thought it would.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from eyas.heads.drafting import draft_from_slots, simulate_chains
from eyas.heads.formats.read import read_head
from eyas.heads.target import DTYPES, HiddenStateCapture, load_target_model, load_target_pieces

Predictor = Callable[[list[int], int], list[int]]


def acceptance_predictor(
    head_dir: Path, *, target_dir: Path, draft_length: int, dtype: str, trust_remote_code: bool
) -> Predictor:
    """A function (token ids, prompt length) -> accepted tokens of each draft step, for chains of `draft_length`.

    Target and head are loaded at the first call, since most uses of a stage never make one.

    Args:
        head_dir: a head directory that vLLM serves. dtype: of the target's forward pass; the head runs in float32.
    """
    loaded: list[Predictor] = []

    def predict(token_ids: list[int], num_prompt_tokens: int) -> list[int]:
        if not loaded:
            loaded.append(
                _load(
                    head_dir,
                    target_dir=target_dir,
                    draft_length=draft_length,
                    dtype=DTYPES[dtype],
                    trust_remote_code=trust_remote_code,
                )
            )
        return loaded[0](token_ids, num_prompt_tokens)

    return predict


def _load(
    head_dir: Path, *, target_dir: Path, draft_length: int, dtype: torch.dtype, trust_remote_code: bool
) -> Predictor:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pieces = load_target_pieces(target_dir).to(device)
    embedding_VH, readout_VH = pieces.embedding_VH.float(), pieces.readout_VH.float()
    model = load_target_model(target_dir, dtype=dtype, trust_remote_code=trust_remote_code).to(device)
    head = read_head(head_dir, target_config=model.config.get_text_config()).to(device)
    capture = HiddenStateCapture(model, capture_layers=head.config.capture_layers or ())
    readout_DH = readout_VH[head.draft_to_target_D]

    def predict(token_ids: list[int], num_prompt_tokens: int) -> list[int]:
        token_ids_T = torch.tensor(token_ids, device=device)
        # The first slot is the last prompt token; the last one still has an answer token to be right about.
        slots_S = torch.arange(num_prompt_tokens - 1, len(token_ids) - 2, device=device)
        if slots_S.numel() == 0:
            return []
        captured_BTX, last_BTH = capture(token_ids_T[None])
        states_BTX = captured_BTX if head.feature_source == "captured" else last_BTH
        draft_SK = draft_from_slots(
            head,
            embedding_VH=embedding_VH,
            target_readout_DH=readout_DH,
            token_ids_T=token_ids_T,
            states_TX=states_BTX[0].float(),
            slots_S=slots_S,
            num_tokens=draft_length,
        )
        return simulate_chains(draft_SK.cpu(), truth_T=token_ids_T.cpu(), slots_S=slots_S.cpu())

    return predict
