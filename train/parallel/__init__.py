"""Training in one process or many, behind one interface (engine.py)."""

from eyas.train.parallel.engine import TrainingEngine
from eyas.train.parallel.start import Processes, join_processes, start_processes, training_engine

__all__ = ["Processes", "TrainingEngine", "join_processes", "start_processes", "training_engine"]
