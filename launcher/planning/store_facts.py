"""Whether checkpoints can be copied to a URL from here: fsspec, and the package of its own that a protocol takes."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.planning.topology import Finding


def store_fault(store: str) -> str:
    """Why the workers' own interpreter, which is ours, cannot use `checkpoint.store`; empty where it can."""
    protocol, separator, _ = store.partition("://")
    if not separator:
        return ""
    try:
        from fsspec import get_filesystem_class
    except ImportError:
        return "it needs the package fsspec, which is not installed here"
    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:  # its package is missing, or nobody knows the protocol
        return str(error)
    return ""


def store_refusals(store: str, fault: str) -> Iterator[Finding]:
    """Pure."""
    if fault:
        message = f"{store} cannot be used here: {fault}"
        hint = "install what it needs beside the launcher (s3fs for s3://, gcsfs for gs://, adlfs for az://)"
        yield Finding("checkpoint.store", message, hint)
