"""Starts what runs on a node by the path of this file: `python -P start.py --run-dir DIR --local`.

The package is loaded from where this file is, in the installation or in a run directory, and gets no place on sys.path:
its interpreter needs nothing of ours, and a `launcher` or `jobs` of the user's on PYTHONPATH is never taken for ours.
Standard library only.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import NoReturn


def load_package() -> None:
    """Make `import launcher` mean ours, and nothing else importable; `import jobs`, too, where it was carried along."""
    here = Path(__file__).resolve().parent
    carried = here / "launcher"
    _load("launcher", carried if carried.is_dir() else here.parent)
    if (here / "jobs").is_dir():
        _load("jobs", here / "jobs")


def _load(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main() -> NoReturn:
    """`start.py --zygote FD MODULES...`, `start.py --relay`, `start.py --devices ORDER`, or the agents of a run.

    `start.py --preflight ORDER` measures a node before a run;
    `start.py --detached ...` are the same agents, without the connection that has started them;
    `start.py --home ...` tells the machine that has launched them what is new here;
    `start.py --rented URL ...` is the agent of a node on a machine that is taken down after the run.
    """
    load_package()
    if sys.argv[1:2] == ["--zygote"]:
        from launcher.agent import zygote

        zygote.main(int(sys.argv[2]), sys.argv[3:])
    if sys.argv[1:2] == ["--relay"]:
        from launcher.agent import torchrun

        torchrun.relay()
    if sys.argv[1:2] == ["--devices"]:
        from launcher.agent import devices

        devices.main(sys.argv[2])
    if sys.argv[1:2] == ["--preflight"]:
        from launcher.agent import preflight_node

        preflight_node.main(sys.argv[2])
    if sys.argv[1:2] == ["--home"]:
        from launcher.agent import home

        home.main(sys.argv[2:])
    if sys.argv[1:2] == ["--detached"]:
        from launcher.agent import detached

        del sys.argv[1]
        detached.detach(sys.argv[1:])
    if sys.argv[1:2] == ["--rented"]:
        from launcher.agent import rented

        rented.run_rented(sys.argv[2], sys.argv[3:])
    if sys.argv[1:2] == ["--copy-record"]:
        from launcher.agent import rented

        rented.copy_record(*sys.argv[2:5])
    from launcher.agent import __main__ as agents

    agents.main()


if __name__ == "__main__":
    main()
