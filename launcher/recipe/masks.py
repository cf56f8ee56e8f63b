"""What a message about a recipe does not repeat: values that are secrets by their form or their name."""

from __future__ import annotations

import re

from launcher.redact import is_secret_name

MASK = "***"

FORMS = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic
    r"|wandb_v1_[A-Za-z0-9_]{20,}"  # Weights & Biases; its older keys look like any hash
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[A-Za-z0-9_-]{20,}"  # GitHub, GitLab
    r"|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{35}"  # AWS, Google
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|nvapi-[A-Za-z0-9_-]{20,}"  # Slack, NVIDIA
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TOKENS = frozenset(
    {
        *("ADDITIONAL", "AUDIO", "BOS", "CLS", "DECODER_START", "EOS", "IMAGE", "MASK", "NEW", "PAD", "PER", "PROMPT"),
        *("SEP", "SPECIAL", "START", "STOP", "UNK", "VIDEO"),
    }
)
"""X_TOKEN that every tokenizer has."""


def masked(text: str) -> str:
    """A text without what has the form of a key."""
    return FORMS.sub(MASK, text)


def shown_override(text: str) -> str:
    """KEY=VALUE as messages show it: without the value where a secret may be in it."""
    key, separator, _ = text.partition("=")
    if separator and any(names_secret(word) for word in _WORD.findall(text)):
        return f"{key}={MASK}"
    return masked(text)


def names_secret(name: str) -> bool:
    """Whether a key or variable of this name holds a secret. The tokens of a tokenizer are none."""
    upper = name.upper().replace("-", "_").lstrip("_")
    return is_secret_name(upper) and not (upper.endswith("_TOKEN") and upper.removesuffix("_TOKEN") in _TOKENS)
