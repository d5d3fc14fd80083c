"""The stages of a run: what each is made from, which settings change it, and which function fills it.

They lie in data_stages.py, generation_stages.py, feature_stage.py, train_stages.py, export_stage.py and score_stage.py.
One short function per stage unpacks the recipe into the values that its body takes; below these files no recipe travels.
Stages are built one after the other, because what a stage is made from is the files of the stages before it.
"""

from __future__ import annotations

from collections.abc import Callable

from eyas.recipes.data_stages import collect_stage, prepare_stage
from eyas.recipes.export_stage import export_stage
from eyas.recipes.feature_stage import extract_stage
from eyas.recipes.generation_stages import regenerate_stage, synthesise_stage
from eyas.recipes.run import Run
from eyas.recipes.score_stage import score_stage
from eyas.recipes.stage import Stage
from eyas.recipes.train_stages import train_stage

STAGES: dict[str, Callable[[Run], Stage]] = {
    "synthesise": synthesise_stage,
    "collect": collect_stage,
    "regenerate": regenerate_stage,
    "prepare": prepare_stage,
    "extract": extract_stage,
    "train": train_stage,
    "export": export_stage,
    "score": score_stage,
}
