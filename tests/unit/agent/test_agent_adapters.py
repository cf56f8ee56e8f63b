"""Adapters without their frameworks: the hook, the choice of a checkpoint, and who changes which Trainer how."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from launcher.agent.adapters import hf, lightning
from launcher.agent.adapters.hook import after_import
from launcher.agent.adapters.ledger import Ledger, damage_of_file
from launcher.agent.adapters.ranks import Stop
from launcher.runs.checkpoints import find_checkpoint
from launcher.runs.rundir import RunDir


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RUN_ID": "me", "RUN_DIR": tmp_path, "CHECKPOINT_DIR": tmp_path / "checkpoints", "ATTEMPT": "2"}
    for name, value in names.items():
        monkeypatch.setenv(f"LAUNCH_{name}", str(value))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hf, "tell_step", lambda step: None)  # launch_client, which belongs to one run


class TestHook:
    @pytest.fixture(autouse=True)
    def _restored(self) -> Iterator[None]:
        finders, modules = list(sys.meta_path), set(sys.modules)
        yield
        sys.meta_path[:] = finders
        for name in set(sys.modules) - modules:
            del sys.modules[name]

    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """A package that imports its own inner module, as frameworks do."""
        name = f"pkg{next(_names)}"
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text(f"from {name}.inner.trainer import Trainer\n")
        (tmp_path / name / "inner" / "__init__.py").touch()
        (tmp_path / name / "inner" / "trainer.py").write_text("class Trainer:\n    pass\nDONE = True\n")
        monkeypatch.syspath_prepend(tmp_path)
        return name

    def test_action_comes_after_the_module_and_before_who_imports_it(self, package: str) -> None:
        seen: list[ModuleType] = []
        after_import(f"{package}.inner.trainer", lambda module: (seen.append(module), setattr(module, "Trainer", 7))[0])
        assert package not in sys.modules, "nothing is imported by the hook"
        assert importlib.import_module(package).Trainer == 7
        assert [module.DONE for module in seen] == [True]

    def test_module_stays_what_it_is_for_inspect_and_a_reload(self, package: str) -> None:
        seen: list[ModuleType] = []
        after_import(f"{package}.inner.trainer", seen.append)
        module = importlib.import_module(f"{package}.inner.trainer")
        assert "class Trainer" in inspect.getsource(module.Trainer)
        importlib.reload(module)
        assert len(seen) == 1

    def test_preloaded_module_is_changed_at_once(self, package: str) -> None:
        module = importlib.import_module(f"{package}.inner.trainer")
        seen: list[ModuleType] = []
        after_import(f"{package}.inner.trainer", seen.append)
        assert seen == [module]

    def test_module_that_is_not_there_is_still_an_import_error(self) -> None:
        after_import("no_such_package_of_ours.trainer", lambda module: None)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_package_of_ours.trainer")


_names = itertools.count()


class TestLedger:
    def save(self, tmp_path: Path, step: int, *, name: str = "out", training: int = 1) -> Path:
        folder = tmp_path / name / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        torch.save({"step": step, "w": torch.zeros(500)}, folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        Ledger().add(folder, step=step, training=training, identity=("trainer_state.json",))
        return folder

    def test_newest_is_the_one_with_the_most_steps(self, tmp_path: Path) -> None:
        for step in (100, 20, 40):
            self.save(tmp_path, step)
        choice = Ledger().newest(training=1)
        assert choice.path == str(tmp_path / "out/checkpoint-100")
        assert choice.step == 100

    @pytest.mark.parametrize("how", ["truncated", "zeroed", "bit flipped", "a file is missing", "of another run"])
    def test_broken_one_is_passed_over_by_name(self, tmp_path: Path, how: str) -> None:
        """F009."""
        self.save(tmp_path, 20)
        file = self.save(tmp_path, 40) / "optimizer.pt"
        data = bytearray(file.read_bytes())
        if how == "truncated":
            file.write_bytes(data[:100])
        elif how == "zeroed":
            file.write_bytes(bytes(len(data)))
        elif how == "bit flipped":
            data[data.index(bytes(500)) + 250] ^= 1
            file.write_bytes(data)
        elif how == "a file is missing":
            file.unlink()
        else:
            (file.parent / "trainer_state.json").write_text(json.dumps({"global_step": 41}))
        choice = Ledger().newest(training=1)
        assert choice.step == 20
        assert len(choice.skipped) == 1
        assert choice.skipped[0].startswith(f"{file.parent} is broken: ")

    def test_one_that_was_removed_is_not_worth_a_word(self, tmp_path: Path) -> None:
        self.save(tmp_path, 20)
        (self.save(tmp_path, 40)).rename(tmp_path / "elsewhere")
        choice = Ledger().newest(training=1)
        assert (choice.step, choice.skipped) == (20, ())

    def test_each_training_of_a_script_has_its_own(self, tmp_path: Path) -> None:
        self.save(tmp_path, 20)
        self.save(tmp_path, 90, name="second", training=2)
        assert Ledger().newest(training=1).step == 20
        assert Ledger().newest(training=3).path is None

    def test_nothing_of_another_run_is_ever_taken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.save(tmp_path, 40)
        monkeypatch.setenv("LAUNCH_RUN_DIR", str(tmp_path / "other"))
        assert Ledger().newest(training=1).path is None

    def test_a_run_that_was_moved_finds_its_checkpoints(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = tmp_path / "run"
        monkeypatch.setenv("LAUNCH_RUN_DIR", str(run))
        self.save(run, 40)
        run.rename(tmp_path / "moved")
        monkeypatch.setenv("LAUNCH_RUN_DIR", str(tmp_path / "moved"))
        assert Ledger().newest(training=1).path == str(tmp_path / "moved/out/checkpoint-40")

    def test_a_line_cut_short_hides_nothing(self, tmp_path: Path) -> None:
        self.save(tmp_path, 20)
        with (tmp_path / "events/adapter.jsonl").open("a") as file:
            file.write('{"event": "checkpoint_saved", "ste')
        assert Ledger().newest(training=1).step == 20

    def test_launch_path_finds_it(self, tmp_path: Path) -> None:
        self.save(tmp_path, 20)
        self.save(tmp_path, 40)
        assert find_checkpoint(RunDir(tmp_path), "latest") == tmp_path / "out/checkpoint-40"
        assert find_checkpoint(RunDir(tmp_path), "20") == tmp_path / "out/checkpoint-20"

    @pytest.mark.parametrize(
        ("data", "damage"),
        [
            (bytes(100), "has no header"),
            (b"", "has no header"),
            ((20).to_bytes(8, "little") + b"{not json at all....", "has a header that cannot be read"),
            (
                (49).to_bytes(8, "little") + b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'[:49],
                "has a header",
            ),
        ],
    )
    def test_damaged_safetensors(self, tmp_path: Path, data: bytes, damage: str) -> None:
        (tmp_path / "model.safetensors").write_bytes(data)
        assert str(damage_of_file(tmp_path / "model.safetensors")).startswith(damage)

    def test_safetensors_of_their_own_library_are_good_until_they_are_cut(self, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        file = tmp_path / "model.safetensors"
        save_file({"a": torch.zeros(3, 4), "b": torch.ones(2)}, file, metadata={"format": "pt"})
        assert damage_of_file(file) is None
        os.truncate(file, file.stat().st_size - 1)
        assert damage_of_file(file) == "is cut off"


class FakeLightning(ModuleType):
    """What `lightning.pytorch.trainer.trainer` has that matters here."""

    def __init__(self) -> None:
        super().__init__("fake_lightning.trainer.trainer")
        calls: list[dict[str, Any]] = []
        self.calls = calls

        class Callback:
            pass

        class Trainer:
            def __init__(self) -> None:
                self.callbacks: list[Any] = []
                self.global_step = 0
                self.ckpt_path = None
                self._signal_connector = SimpleNamespace(_original_handlers={})

            def fit(self, model: Any, ckpt_path: Any = None, weights_only: bool | None = None) -> str:
                calls.append({"model": model, "ckpt_path": ckpt_path, "weights_only": weights_only})
                return "fitted"

            def save_checkpoint(self, filepath: Any, weights_only: bool | None = None) -> None:
                content = {"state": torch.zeros(3)}
                for callback in self.callbacks:
                    callback.on_save_checkpoint(self, None, content)
                Path(filepath).parent.mkdir(parents=True, exist_ok=True)
                torch.save(content, filepath)

        self.Callback, self.Trainer = Callback, Trainer


class TestLightning:
    @pytest.fixture
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> FakeLightning:
        monkeypatch.setitem(sys.modules, "fake_lightning", SimpleNamespace(__version__="2.6.6"))
        monkeypatch.delenv("PL_TRAINER_DEFAULT_ROOT_DIR", raising=False)
        monkeypatch.setenv("PL_TRAINER_DEFAULT_ROOT_DIR", "")  # restored at the end, whatever is set in between
        os.environ.pop("PL_TRAINER_DEFAULT_ROOT_DIR")
        fake = FakeLightning()
        lightning.change_trainer(fake)
        return fake

    def saved(self, fake: FakeLightning, path: Path, step: int) -> None:
        trainer = fake.Trainer()
        trainer.fit("model")
        trainer.global_step = step
        trainer.save_checkpoint(path)

    def restarted(self) -> FakeLightning:
        """The same script in the next attempt."""
        fake = FakeLightning()
        lightning.change_trainer(fake)
        return fake

    def test_folder_without_a_choice_of_the_script_is_in_the_run(self, fake: FakeLightning, tmp_path: Path) -> None:
        assert os.environ["PL_TRAINER_DEFAULT_ROOT_DIR"] == f"{tmp_path}/lightning"

    def test_script_that_has_chosen_keeps_its_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PL_TRAINER_DEFAULT_ROOT_DIR", "/mine")
        lightning.change_trainer(FakeLightning())
        assert os.environ["PL_TRAINER_DEFAULT_ROOT_DIR"] == "/mine"

    def test_signature_and_result_stay(self, fake: FakeLightning) -> None:
        assert list(inspect.signature(fake.Trainer.fit).parameters) == ["self", "model", "ckpt_path", "weights_only"]
        assert fake.Trainer().fit("model") == "fitted"

    def test_goes_on_from_what_this_run_has_saved(self, fake: FakeLightning, tmp_path: Path) -> None:
        self.saved(fake, tmp_path / "ck/a.ckpt", 10)
        again = self.restarted()
        again.Trainer().fit("model")
        assert again.calls == [{"model": "model", "ckpt_path": str(tmp_path / "ck/a.ckpt"), "weights_only": False}]

    def test_checkpoint_that_the_script_names_is_only_the_beginning(
        self, fake: FakeLightning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """F087: own checkpoints win over the one that the script names."""
        fake.Trainer().fit("model", "init.ckpt")
        assert fake.calls[-1]["ckpt_path"] == "init.ckpt"
        assert fake.calls[-1]["weights_only"] is None, "what is not ours is read as the script wishes"
        assert "begins with the script's ckpt_path='init.ckpt'" in capsys.readouterr().out
        self.saved(fake := self.restarted(), tmp_path / "a.ckpt", 25)
        again = self.restarted()
        again.Trainer().fit("model", ckpt_path="init.ckpt")
        assert again.calls[-1]["ckpt_path"] == str(tmp_path / "a.ckpt")
        out = capsys.readouterr().out
        assert f"resumes from step 25: {tmp_path}/a.ckpt, not from the script's ckpt_path='init.ckpt'" in out

    def test_file_that_another_run_has_written_over_is_not_taken(
        self, fake: FakeLightning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.saved(fake, tmp_path / "last.ckpt", 10)
        with monkeypatch.context() as other:
            other.setenv("LAUNCH_RUN_ID", "other-run")
            other.setenv("LAUNCH_RUN_DIR", str(tmp_path / "other"))
            self.saved(self.restarted(), tmp_path / "last.ckpt", 10)
        again = self.restarted()
        again.Trainer().fit("model")
        assert again.calls[-1]["ckpt_path"] is None
        assert "begins at step 0" in capsys.readouterr().out

    def test_weights_alone_are_no_checkpoint(self, fake: FakeLightning, tmp_path: Path) -> None:
        trainer = fake.Trainer()
        trainer.fit("model")
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        assert Ledger().newest(training=1).path is None

    def test_second_training_of_a_script_begins_anew(self, fake: FakeLightning, tmp_path: Path) -> None:
        self.saved(fake, tmp_path / "first.ckpt", 10)
        again = self.restarted()
        again.Trainer().fit("first")
        again.Trainer().fit("second")
        assert [call["ckpt_path"] for call in again.calls] == [str(tmp_path / "first.ckpt"), None]

    def test_version_that_does_not_go_on_exactly_is_said(
        self, fake: FakeLightning, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fake.Trainer().fit("model")
        assert "counts steps wrong" not in capsys.readouterr().out
        monkeypatch.setitem(sys.modules, "fake_lightning", SimpleNamespace(__version__="2.4.0.post1"))
        fake.Trainer().fit("model")
        assert "Lightning 2.4.0.post1 counts steps wrong" in capsys.readouterr().out

    def test_tuner_is_left_alone(self, fake: FakeLightning) -> None:
        trainer = fake.Trainer()
        trainer.callbacks = [SimpleNamespace(_early_exit=True)]
        trainer.fit("model")
        assert len(trainer.callbacks) == 1

    def test_stop_answers_the_signal_with_a_flag(self, fake: FakeLightning) -> None:
        trainer = fake.Trainer()
        trainer.fit("model")
        trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
        assert trainer.callbacks[-1].stop.agreed()


class FakeTransformers(ModuleType):
    """What `transformers.trainer` has that matters here."""

    def __init__(self) -> None:
        super().__init__("trainer")
        calls: list[Any] = []
        self.calls = calls

        class TrainerCallback:
            pass

        class Trainer:
            def __init__(self, args: Any) -> None:
                self.args, self.callbacks = args, []

            def add_callback(self, callback: Any) -> None:
                self.callbacks.append(callback)

            def remove_callback(self, kind: type) -> None:
                self.callbacks = [callback for callback in self.callbacks if not isinstance(callback, kind)]

            def train(self, resume_from_checkpoint: Any = None, trial: Any = None) -> str:
                calls.append(resume_from_checkpoint)
                return "trained"

        self.TrainerCallback, self.Trainer = TrainerCallback, Trainer


class TestHf:
    def args(self, tmp_path: Path, **changes: Any) -> SimpleNamespace:
        values = {"output_dir": str(tmp_path / "out"), "world_size": 1, "save_only_model": False}
        return SimpleNamespace(**{**values, "save_strategy": "steps", **changes})

    def trainer(self, args: SimpleNamespace) -> tuple[Any, FakeTransformers]:
        fake = FakeTransformers()
        hf.change_trainer(fake)
        return fake.Trainer(args), fake

    def saved(self, args: SimpleNamespace, step: int) -> Path:
        trainer, _ = self.trainer(args)
        trainer.train()
        folder = Path(args.output_dir, f"checkpoint-{step}")
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        trainer.callbacks[-1].on_save(args, SimpleNamespace(global_step=step), SimpleNamespace())
        return folder

    def test_goes_on_from_what_this_run_has_finished(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        args = self.args(tmp_path)
        folder = self.saved(args, 20)
        (Path(args.output_dir) / "checkpoint-40").mkdir()
        trainer, fake = self.trainer(args)
        assert trainer.train() == "trained"
        assert fake.calls == [str(folder)]
        out = capsys.readouterr().out
        assert "checkpoint-40 was not finished, or not by this run" in out
        assert f"resumes from step 20: {folder}" in out

    def test_checkpoint_that_the_script_names_is_only_the_beginning(self, tmp_path: Path) -> None:
        """F087."""
        args = self.args(tmp_path)
        trainer, fake = self.trainer(args)
        trainer.train("pretrained/checkpoint-9")
        folder = self.saved(args, 20)
        again, fake_again = self.trainer(args)
        again.train(resume_from_checkpoint="pretrained/checkpoint-9")
        assert (fake.calls, fake_again.calls) == (["pretrained/checkpoint-9"], [str(folder)])

    def test_weights_alone_are_no_checkpoint_and_that_is_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        args = self.args(tmp_path, save_only_model=True)
        self.saved(args, 20)
        assert "this Trainer saves nothing to go on from while it trains" in capsys.readouterr().out
        assert Ledger().newest(training=1).path is None

    def test_stop_saves_all_of_it_at_the_end_of_a_step(self, tmp_path: Path) -> None:
        args = self.args(tmp_path, save_only_model=True)
        trainer, _ = self.trainer(args)
        trainer.train()
        guard, control = trainer.callbacks[-1], SimpleNamespace(should_save=False, should_evaluate=True)
        state = SimpleNamespace(global_step=7)
        guard.on_step_end(args, state, control)
        assert not control.should_save
        guard.stop.request(signal.SIGTERM, None)
        guard.on_step_end(args, state, control)
        assert (args.save_only_model, control.should_save, control.should_evaluate) == (False, True, False)
        folder = Path(args.output_dir, "checkpoint-7")
        folder.mkdir(parents=True)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as end:
                guard.on_save(args, state, control)
        finally:
            signal.signal(signal.SIGTERM, handler)
        assert end.value.code == 75
        assert Ledger().newest(training=1).step == 7

    def test_trainer_that_would_train_alone_in_each_process_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        trainer, fake = self.trainer(self.args(tmp_path))
        with pytest.raises(SystemExit, match="1 process, not with the 2 of the run"):
            trainer.train()
        assert fake.calls == []

    def test_search_is_left_alone(self, tmp_path: Path) -> None:
        trainer, fake = self.trainer(self.args(tmp_path))
        trainer.train(trial={"lr": 1})
        assert (fake.calls, trainer.callbacks) == ([None], [])


def test_stop_takes_sigterm_and_gives_it_back() -> None:
    before, stop = signal.getsignal(signal.SIGTERM), Stop()
    handler = stop.listen()
    assert not stop.agreed()
    signal.raise_signal(signal.SIGTERM)
    assert stop.agreed()
    stop.restore(handler)
    assert signal.getsignal(signal.SIGTERM) == before


def test_adapters_import_no_torch_and_nothing_of_ours() -> None:
    """They are loaded by path, in front of every script that asks for one."""
    folder = Path(lightning.__file__).parent
    source = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("launch_adapters", {str(folder / "__init__.py")!r},
                                              submodule_search_locations=[{str(folder)!r}])
module = sys.modules["launch_adapters"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.install("lightning"), module.install("hf")
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"torch", "launcher", "lightning", "transformers"}}))
"""
    environment = {**os.environ, "LAUNCH_RUN_DIR": "/nowhere"}
    command = [sys.executable, "-I", "-S", "-c", source]
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout == "[]\n"
