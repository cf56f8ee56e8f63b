"""What Docker says: its refusals as sentences, the states of its containers."""

from __future__ import annotations

import pytest

from launcher.executors.docker_places import state_of
from launcher.executors.docker_words import refusal
from launcher.planning.docker_facts import read_info, read_probe

SAID = {
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?": (
        "the Docker daemon of this machine does not answer",
        "systemctl start docker",
    ),
    "Got permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: Get "
    '"http://%2Fvar%2Frun%2Fdocker.sock/v1.24/info": dial unix /var/run/docker.sock: connect: permission denied': (
        "you may not use the Docker daemon of this machine",
        "usermod -aG docker",
    ),
    'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].': (
        "Docker cannot give GPUs to a container",
        "container toolkit",
    ),
    "Error response from daemon: pull access denied for nobody/x, repository does not exist or may require login": (
        "the image me/mine:1 is not there, and cannot be fetched",
        "docker login",
    ),
    "failed to register layer: Error processing tar file(exit status 1): write /x: no space left on device": (
        "the disk of the Docker daemon of this machine is full",
        "docker system prune",
    ),
    "OCI runtime create failed: error setting rlimit type 8: operation not permitted: unknown": (
        "may not raise the limits of a container",
        "LimitMEMLOCK",
    ),
    'invalid mount config for type "bind": bind source path does not exist: /data/x': (
        "there is no /data/x, which a container is to see",
        "docker.mounts",
    ),
}


@pytest.mark.parametrize("said", SAID)
def test_known_refusals_are_sentences_with_what_to_do(said: str) -> None:
    sentence, hint = SAID[said]
    problem = refusal(said, image="me/mine:1")
    assert sentence in problem.message
    assert hint in problem.hint


def test_an_unknown_refusal_is_in_the_words_of_docker() -> None:
    problem = refusal("docker: Error response from daemon: the moon is full.", machine="n1", what="docker run x")
    assert (problem.where, problem.message) == ("n1", "docker run x on n1: the moon is full")


def test_states_of_containers() -> None:
    assert state_of({"Status": "running", "ExitCode": 0}).alive is True
    assert state_of({"Status": "paused", "ExitCode": 0}).alive is True
    done = state_of({"Status": "exited", "ExitCode": 0})
    assert (done.alive, done.exit_code, done.killed, done.detail) == (False, 0, False, "")
    killed = state_of({"Status": "exited", "ExitCode": 137, "OOMKilled": False})
    assert (killed.killed, killed.detail) == (True, "its container was killed by SIGKILL")
    oom = state_of({"Status": "exited", "ExitCode": 137, "OOMKilled": True})
    assert (oom.killed, oom.detail) == (True, "its container was killed: out of memory")
    failed = state_of({"Status": "exited", "ExitCode": 2, "OOMKilled": False})
    assert (failed.killed, failed.detail) == (False, "its container ended with exit code 2")
    never = state_of({"Status": "created", "ExitCode": 128, "Error": "no such device"})
    assert (never.alive, never.detail) == (False, "its container ended with exit code 128: no such device")


def test_what_an_engine_says_of_itself() -> None:
    info = read_info(
        '{"ServerVersion": "20.10.24", "SecurityOptions": ["name=seccomp", "name=rootless"], "MemTotal": 8}'
    )
    assert info == {"version": "20.10.24", "rootless": True, "memory_bytes": 8}
    with pytest.raises(ValueError, match="no daemon"):
        read_info('{"ServerErrors": ["no daemon"]}')


def test_what_an_image_says_of_its_python_whatever_it_prints_besides() -> None:
    found = read_probe("== NVIDIA ==\nlaunch-python 3.12.4\nlaunch-has torch 2.13.0\nlaunch-has numpy 2.1\n", "python3")
    assert found is not None
    interpreter, packages = found
    assert (interpreter.version, interpreter.torch_version) == ("3.12.4", "2.13.0")
    assert packages == {"torch": "2.13.0", "numpy": "2.1"}
    assert read_probe("sh: python3: not found", "python3") is None
