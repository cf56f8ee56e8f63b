"""F060: the value of a secret is in nothing that is written, whatever form it takes there."""

from __future__ import annotations

import base64
import json
import os
import shlex
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import redact
from launcher.redact import Redactor, is_secret_name, known_secrets

VALUE = 'canary-9f3K+/x?z1"q'
ONE = Redactor([("WANDB_API_KEY", VALUE)])


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "hf_token", "AWS_SECRET_ACCESS_KEY", "password", "db-password", "TOKEN", "SSH_PRIVATE_KEY"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "TOKENIZERS_PARALLELISM", "max_tokens", "KEYBOARD", "PATH"])
def test_other_names(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "written",
    [
        VALUE,
        json.dumps({"key": VALUE}),
        repr(VALUE),
        quote(VALUE),
        quote(VALUE, safe=""),
        shlex.quote(VALUE),
        f"https://user:{VALUE}@host",
        base64.b64encode(f"api:{VALUE}".encode()).decode(),
        base64.b64encode(f"user:{VALUE}!".encode()).decode(),
        base64.urlsafe_b64encode(VALUE.encode()).decode(),
    ],
)
def test_a_value_is_replaced_in_every_form(written: str) -> None:
    assert "***WANDB_API_KEY***" in ONE.text(written)
    assert "9f3K" not in ONE.text(written)


@given(st.text(), st.text(min_size=8), st.text())
def test_no_value_survives(before: str, value: str, after: str) -> None:
    redactor = Redactor([("A_TOKEN", value)])
    left = redactor.text(before + value + after).replace("***A_TOKEN***", "")
    assert value not in left or value in "***A_TOKEN***"


def test_the_longer_of_two_values_is_replaced_first() -> None:
    redactor = Redactor([("A_TOKEN", "abcdefgh1"), ("B_TOKEN", "abcdefgh1-and-more")])
    assert redactor.text("abcdefgh1-and-more abcdefgh1") == "***B_TOKEN*** ***A_TOKEN***"


def test_each_longer_line_of_a_value_is_replaced_for_itself() -> None:
    """Logs are written line by line."""
    key = "-----BEGIN-----\nMIIEvQIBADANBgkqhkiG9w0B\nshort\n-----END-----"
    redactor = Redactor([("SSH_PRIVATE_KEY", key)])
    assert redactor.data(b"1: MIIEvQIBADANBgkqhkiG9w0B\n") == b"1: ***SSH_PRIVATE_KEY***\n"


def test_documents_are_redacted_in_keys_and_values() -> None:
    assert ONE.document({VALUE: [VALUE, 1, None, True]}) == {
        "***WANDB_API_KEY***": ["***WANDB_API_KEY***", 1, None, True]
    }


def test_short_values_words_numbers_and_paths_are_left_alone(tmp_path: Path) -> None:
    environment = {
        "A_TOKEN": "short",
        "POSTGRES_PASSWORD": "password",
        "PIN_TOKEN": "12345678",
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    assert list(known_secrets(environment)) == []


def test_what_the_recipe_names_is_a_secret_whatever_it_is_called() -> None:
    environment = {"LICENCE": "password", "SHORT": "1234567"}
    assert list(known_secrets(environment, ["LICENCE", "SHORT", "MISSING"])) == [("LICENCE", "password")]


def test_passwords_in_urls_and_in_netrc_are_secrets(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password 0123456789abcdef0123\n")
    environment = {"HTTPS_PROXY": "http://me:pr0xy-word@proxy:3128", "HOME": str(tmp_path)}
    assert dict(known_secrets(environment)) == {"HTTPS_PROXY": "pr0xy-word", "NETRC": "0123456789abcdef0123"}


def test_the_process_knows_its_own_secrets_and_those_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_remembered", set())
    monkeypatch.setenv("WANDB_API_KEY", VALUE)
    monkeypatch.setenv("LICENCE", "a-licence-1")
    assert redact.own().text(f"{VALUE} a-licence-1") == "***WANDB_API_KEY*** a-licence-1"
    redact.remember(["LICENCE"])
    assert redact.own().text(f"{VALUE} a-licence-1") == "***WANDB_API_KEY*** ***LICENCE***"
    monkeypatch.delenv("WANDB_API_KEY")
    assert redact.own().text(VALUE) == VALUE


def test_a_traceback_of_ours_is_redacted_on_its_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", VALUE)
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader:
        print(f"the key {VALUE} \udcff", file=redact.RedactedStream(write_end), end="")
        os.close(write_end)
        assert reader.read() == b"the key ***WANDB_API_KEY*** \\udcff"
