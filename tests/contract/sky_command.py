"""SkyPilot's command: of an environment of its own, since it brings a hundred packages (`make sky-deps`)."""

from __future__ import annotations

import os
from pathlib import Path

SKY = Path(os.environ.get("LAUNCH_TEST_SKY") or Path(__file__).parents[2] / "build" / "sky" / "bin" / "sky")
"""LAUNCH_TEST_SKY names another one."""
