"""What `eyas ceiling` concludes: only the ends of intervals settle anything, and the words say where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.eval.cost.ceiling_rows import MODEST, _reach, ceiling_results
from eyas.eval.cost.ceiling_words import _limit, _open_sizes, _where, ceiling_sentences, ceiling_table
from tests.ceiling_starts import SIZES, law, results_of, starts_of


def test_up_to_which_concurrency(tmp_path: Path) -> None:
    """modest: best speedups over k are 1.5, 1.4 and 1.0 at batch sizes 1, 4 and 16."""
    modest = results_of(tmp_path)["reach"]["modest"]
    best = {size: max((MODEST.tau(k) / (law(f"k{k}", size) / law("ar", size)), k) for k in (1, 3)) for size in SIZES}
    assert [each["batch_size"] for each in modest] == list(SIZES)
    assert [each["outcome"] for each in modest] == ["yes" if best[size][0] >= 1.05 else "no" for size in SIZES]
    assert [(each["speedup"], each["draft_length"]) for each in modest] == [
        (pytest.approx(best[size][0]), best[size][1]) for size in SIZES
    ]


def at(batch_size: int, draft_length: int, *, best: float, low: float, high: float) -> dict[str, Any]:
    names = ("best_case", "modest", "good")
    place = {"batch_size": batch_size, "draft_length": draft_length}
    return place | dict.fromkeys(names, best) | {"intervals": {name: [low, high] for name in names}}


def test_only_the_ends_of_intervals_settle_anything() -> None:
    """Held against 1.05: worth it from the bad end up, impossible from the good end down, open between."""
    rows = [
        at(1, 1, best=1.5, low=1.0, high=2.0),
        at(1, 3, best=1.1, low=1.06, high=1.2),
        at(4, 1, best=1.2, low=1.0, high=1.4),
        at(4, 3, best=0.9, low=0.8, high=1.0),
        at(8, 1, best=0.9, low=0.8, high=1.04),
        at(16, 1, best=1.3, low=1.2, high=1.4),
    ]
    found = _reach(rows, "good", least=1.05)
    assert [each["outcome"] for each in found] == ["yes", "not settled", "no", "yes"]
    assert [each["draft_length"] for each in found] == [3, 1, 1, 1]
    assert [each["outcome"] for each in _reach(rows[3:4], "good", least=1.0)] == ["not settled"]


def test_noisy_starts_settle_nothing(tmp_path: Path) -> None:
    """Starts of 30 % scatter: 1.36x on average is neither worth it nor impossible, and the words claim neither."""
    scatter = {0: 0.7, 1: 1.3}
    noisy = noisy_starts(tmp_path, scatter=scatter)
    results = ceiling_results(noisy, context={})
    modest = results["reach"]["modest"]
    assert {each["outcome"] for each in modest[:2]} == {"not settled"}
    assert modest[0]["speedup"] > 1.05
    low, high = modest[0]["interval"]
    assert low < 1.05 < high
    text = " ".join(ceiling_sentences(results))
    assert "NOT SETTLED" in text
    assert "A head is worth training here" not in text
    assert "A head is not worth training here" not in text


def noisy_starts(directory: Path, *, scatter: dict[int, float]) -> list:
    """Two starts per arm, one fast and one slow."""
    starts = []
    for repeat, factor in scatter.items():
        slowed = starts_of(directory / str(repeat), law=lambda arm, running, f=factor: f * law(arm, running), repeats=1)
        starts += slowed
    return starts


def test_words_where_only_larger_batches_pay_name_the_sizes() -> None:
    """A head that does not pay at 1 but at 4 and 8 is worth it at 4 and 8; one that cannot at 1 alone says "at", not "from"."""
    found = {1: "no", 4: "yes", 8: "yes", 16: "not settled"}
    reach = [
        {"batch_size": size, "outcome": outcome, "draft_length": 3, "speedup": 1.2, "interval": [1.1, 1.3]}
        for size, outcome in found.items()
    ]
    results = {"reach": dict.fromkeys(("best_case", "modest", "good"), reach), "worth": 1.05}
    assert _where(results, "modest") == "at batch sizes 4 and 8"
    first, second = _limit(results)
    assert first == "At batch size 1 even a head whose every draft is accepted is slower than plain decoding."
    assert second.startswith("NOT SETTLED at batch size 16")
    assert len(_open_sizes(results)) == 2


def test_words_of_a_target_for_which_a_head_pays(tmp_path: Path) -> None:
    results = results_of(tmp_path)
    text = " ".join(ceiling_sentences(results))
    assert text.startswith("Synthetic: the head's weights are random")
    assert "A head is worth training here for up to" in text
    assert "gave the same step time in 6 of 6 cells" in text
    assert "NOT SETTLED" not in text
    table = ceiling_table(results)
    assert len(table.splitlines()) == 7
    assert f"{law('k3', 4) / law('ar', 4):.2f}" in table


def test_words_where_verifying_costs_as_much_as_decoding(tmp_path: Path) -> None:
    """Every token costs a whole step: nothing can pay, however much is accepted."""

    def hopeless(arm: str, running: int) -> float:
        length = int(arm[1]) if arm != "ar" else 0
        return 0.01 * (length + 1) * running + 0.02 * length

    text = " ".join(ceiling_sentences(results_of(tmp_path, law=hopeless)))
    assert "A head is not worth training here" in text
    assert "From batch size 1 on even a head whose every draft is accepted is slower" in text
    assert "impossible" in ceiling_table(results_of(tmp_path / "again", law=hopeless))
