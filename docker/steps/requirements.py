"""Print what the launcher and its training jobs need: an image installs it before the code.

`requirements.py PYPROJECT CONSTRAINTS [BUILD]`; with `cpu` as the build, torch is the build for CPUs of the version in
the constraints, so that another one is never taken, nor its gigabytes of CUDA.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["train"], sep="\n")
pins = dict(line.split("==") for line in Path(sys.argv[2]).read_text(encoding="utf-8").splitlines() if "==" in line)
for build in sys.argv[3:]:
    print(f"torch=={pins['torch']}+{build}")
