"""Slurm's short forms stand for what ``scontrol show hostnames`` prints."""

from __future__ import annotations

import pytest

from hvdkit.environments.launchers import expand_counts, expand_hosts
from hvdkit.errors import EnvironmentConflictError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,7],gpu1", ["node01", "node02", "node03", "node7", "gpu1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("x-1,y[3]", ["x-1", "y3"]),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", ",a", "a,", "a[1-", "a]", "a[x]", "a[]", "a[1,]", "a[1]]"])
def test_malformed_host_lists_are_refused(text):
    with pytest.raises(EnvironmentConflictError, match="HINT"):
        expand_hosts(text)


def test_task_counts():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(EnvironmentConflictError):
        expand_counts("2x3")
