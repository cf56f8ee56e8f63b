"""`target: package.module:function`, a function of the user's own in place of a name.

It is imported from the folder in which the run works (`workdir`), or from what is installed, and called with the other
keys of its section as keyword arguments. What is wrong with the recipe is said in a sentence; what the user's own code
raises is shown as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jobs.registry import OptionError


def call_target(key: str, target: str, options: Mapping[str, Any]) -> Any:
    """What the function makes of the options. `key`: the section, `model` or `data`.

    Raises OptionError where there is no such module or function, or where it does not take these options.
    """
    function = find_target(key, target)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function of C that does not say what it takes
        return function(**options)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise OptionError(f"{key}.target: {target} {_sentence(error, signature)}") from None
    return function(**options)


def find_target(key: str, target: str) -> Callable[..., Any]:
    """The function. Raises OptionError where it is not there."""
    module_name, separator, path = target.partition(":")
    if not (separator and all(name.isidentifier() for name in f"{module_name}.{path}".split("."))):
        raise OptionError(f"{key}.target: {target!r} is not `package.module:function`")
    module = _import(key, target, module_name)
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise OptionError(f"{key}.target: there is no {path} in {module.__file__ or module_name}")
        found = getattr(found, name)
    if not callable(found):
        raise OptionError(f"{key}.target: {target} is no function but a {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def _import(key: str, target: str, name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # and it stays: what is imported here may import more later
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise OptionError(
            f"{key}.target: there is no module {error.name} for {target}, neither in {folder} nor installed in "
            f"{sys.executable}"
        ) from None


def _sentence(error: TypeError, signature: inspect.Signature) -> str:
    """`got an unexpected keyword argument 'x'`, as a user of a recipe understands it."""
    takes = ", ".join(signature.parameters) or "nothing"
    word = str(error).rpartition("argument")[2].strip(" :").strip("'")
    if "missing" in str(error):
        return f"needs the option {word}; it takes {takes}"
    return f"has no option {word}; it takes {takes}"
