"""The benchmark's modules lie beside each other and import each other by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
