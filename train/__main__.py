"""`python -m eyas.train RECIPE [section.field=value ...]`: the same as `eyas train`, for launchers that want a module.

This file belongs to the floor of the command line; nothing else in train imports eyas.recipes.
"""

from __future__ import annotations

import sys

from eyas.recipes.cli import app

if __name__ == "__main__":
    app(["train", *sys.argv[1:]], prog_name="eyas")
