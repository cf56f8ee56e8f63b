"""Lists of hosts as SLURM writes them. What is expected here is what `scontrol show hostnames` of 22.05 has printed."""

from __future__ import annotations

import pytest

from launcher.agent.hostlist import expand

KNOWN = {
    "a": "a",
    "a,b": "a b",
    "a[1-3]": "a1 a2 a3",
    "a[01-03,7],b": "a01 a02 a03 a7 b",
    "a[1-2]b[01-02]": "a1b01 a1b02 a2b01 a2b02",
    "n-a[1-2]": "n-a1 n-a2",
    "b,a": "b a",
    "a[3,1-2]": "a3 a1 a2",
    "a[1-2],a[1-2]": "a1 a2 a1 a2",
    "[1-2]": "1 2",
    "a,,b": "a b",
    "a[9-11]": "a9 a10 a11",
    "a[09-11]": "a09 a10 a11",
    "a[098-101]": "a098 a099 a100 a101",
    "n1,n2,n[3-4]": "n1 n2 n3 n4",
    "a1b2[3-4]": "a1b23 a1b24",
    "gpu[01,03-04],cpu[1-2],login": "gpu01 gpu03 gpu04 cpu1 cpu2 login",
    "a[1-2][3-4]": "a13 a14 a23 a24",
    "a[1]": "a1",
    "node-a-[1-2],node-b-[1-2]": "node-a-1 node-a-2 node-b-1 node-b-2",
    "a.b.c,d.e": "a.b.c d.e",
    "z[2,1]": "z2 z1",
    "r[1-2]-c[1-2]": "r1-c1 r1-c2 r2-c1 r2-c2",
    "n001": "n001",
    "n[1,1]": "n1 n1",
}


@pytest.mark.parametrize("text", KNOWN)
def test_as_scontrol_reads_them(text: str) -> None:
    """F038: padding, several groups, several brackets in a name, dashes, the order as it is written."""
    assert " ".join(expand(text)) == KNOWN[text]


def test_names_that_go_on_after_a_bracket() -> None:
    """22.05 refuses them; newer versions, and sites, have them."""
    assert expand("x[001-002]y,a[1-2]-ib0") == ("x001y", "x002y", "a1-ib0", "a2-ib0")


@pytest.mark.parametrize(
    "text", ["", " ", ",", "linux[1", "a[1-2,", "a[1-2]]", "a[]", "a[2-1]", "a[x]", "a[1-]", "a[[1]]"]
)
def test_what_is_no_list_is_an_error_and_never_a_host(text: str) -> None:
    """F038: a half-read list once made the wrong node the head."""
    with pytest.raises(ValueError, match=r"is not a list of hosts|names no host"):
        expand(text)


def test_a_range_that_would_fill_the_memory_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not go up"):
        expand("a[1-999999999]")
    with pytest.raises(ValueError, match="names 100000000 hosts"):
        expand("a[1-10000]b[1-10000]")
