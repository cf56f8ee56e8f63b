"""Files of `slurm/` that an installation has too: profiles of sites, and the batch template.

Here they are links into the clone; a wheel holds what they lead to.
"""

from __future__ import annotations

from pathlib import Path

PROFILES = Path(__file__).with_name("profiles")
BATCH_TEMPLATE = Path(__file__).with_name("batch.sh.j2")
