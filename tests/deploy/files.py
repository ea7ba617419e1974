"""Where things are."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
DEPLOY: Final = ROOT / "deploy"
