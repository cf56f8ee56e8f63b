from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from jobs import registry
from jobs.data.given import Given
from jobs.registry import OptionError
from jobs.target import call_target
from launcher.recipe.schema import DataSection, ModelSection

SOURCE = """
from torch import nn

class Nets:
    @staticmethod
    def small(*, width: int):
        return nn.Linear(width, width)

def net(*, width: int = 3, depth: int = 1):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

def data(*, count: int):
    return [(float(k), k) for k in range(count)]

def breaks():
    raise TypeError("mine")

NUMBER = 7
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of the user's own, in which the run works."""
    (tmp_path / "mine_x").mkdir()
    (tmp_path / "mine_x" / "nets.py").write_text(SOURCE)
    (tmp_path / "mine_x" / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine_x" and name not in before]:
        del sys.modules[name]


def build(kind: str, section: type[ModelSection] | type[DataSection], **keys: Any) -> Any:
    return registry.build_section(kind, section.model_validate(keys))


def test_a_function_in_the_folder_of_the_run_makes_the_network() -> None:
    net = build("model", ModelSection, target="mine_x.nets:net", width=5, depth=2)
    assert isinstance(net, nn.Sequential)
    assert [layer.in_features for layer in net] == [5, 5]
    assert build("model", ModelSection, target="mine_x.nets:Nets.small", width=4).in_features == 4
    assert build("model", ModelSection, target="torch.nn:Linear", in_features=2, out_features=3).out_features == 3


def test_a_section_with_a_name_is_built_as_ever() -> None:
    assert build("model", ModelSection, name="mlp", layers=0)[1].in_features == 784


def test_a_function_makes_the_data_when_it_is_prepared() -> None:
    source = build("dataset", DataSection, target="mine_x.nets:data", global_batch_size=2, count=4)
    assert isinstance(source, Given)
    source.prepare()
    assert len(source.load().train) == 4


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (
            "mine_x.none:net",
            {},
            r"model.target: there is no module mine_x.none for mine_x.none:net, neither in /.* nor",
        ),
        ("none_x:net", {}, r"model.target: there is no module none_x for none_x:net"),
        ("mine_x.nets:none", {}, r"model.target: there is no none in /.*/mine_x/nets.py"),
        ("mine_x.nets:Nets.none", {}, r"model.target: there is no Nets.none in /.*/mine_x/nets.py"),
        ("mine_x.nets:NUMBER", {}, r"model.target: mine_x.nets:NUMBER is no function but a int"),
        ("mine_x.nets", {}, r"model.target: 'mine_x.nets' is not `package.module:function`"),
        ("mine_x/nets.py:net", {}, r"model.target: 'mine_x/nets.py:net' is not `package.module:function`"),
        ("mine_x.nets:net", {"wide": 3}, r"model.target: mine_x.nets:net has no option wide; it takes width, depth"),
        ("mine_x.nets:Nets.small", {}, r"model.target: mine_x.nets:Nets.small needs the option width; it takes width"),
    ],
)
def test_what_is_wrong_with_a_target_is_one_sentence(target: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        call_target("model", target, options)
    assert "\n" not in str(caught.value)
    assert caught.value.launch_plain


def test_what_the_users_own_code_raises_is_left_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        call_target("model", "mine_x.broken:net", {})
    with pytest.raises(TypeError, match=r"^mine$"):
        call_target("model", "mine_x.nets:breaks", {})
