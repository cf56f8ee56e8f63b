"""The command `launch`, under a name that no file of a user's has.

`from launcher.cli.main import entry` would take a `launcher.py` of his own where PYTHONPATH names its folder.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as typing has it, without importing that
if TYPE_CHECKING:
    from typing import NoReturn


def entry() -> NoReturn:
    """Import our package from beside this file, wherever sys.path leads, and run the command."""
    folder = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - pathlib would cost every command
    sys.path.insert(0, folder)
    import launcher  # noqa: F401

    sys.path.remove(folder)
    from launcher.cli.main import entry as command

    command()
