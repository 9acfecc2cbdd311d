"""Host strings and host files become slots: each host filled before the next, local ranks counted."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.launch import UsageError
from hvdkit.launch.elastic.discovery import FixedHosts, HostDiscoveryScript
from hvdkit.launch.hosts import Host, Placement, assign_slots, parse_hostfile, parse_hosts


def test_host_strings():
    assert parse_hosts("h1:2, h-2.example_x:1,10.0.0.1:4,[fe80::1]:1") == [
        Host("h1", 2),
        Host("h-2.example_x", 1),
        Host("10.0.0.1", 4),
        Host("fe80::1", 1),
    ]


@pytest.mark.parametrize(
    "text", ["", "h", "h:", ":2", "h:0", "h:x", "h:1;rm", "-h:1", "h:1,h:2", "a b:1", "h:1:2", "$x:1"]
)
def test_malformed_host_strings_are_refused(text):
    with pytest.raises(UsageError, match="HINT"):
        parse_hosts(text)


def test_host_files():
    text = "# the cluster\nh1 slots=2\n\n  h2\tslots = 3  # big\nh3\nh4:4\n"
    assert parse_hostfile(text, "f") == [Host("h1", 2), Host("h2", 3), Host("h3", 1), Host("h4", 4)]


@pytest.mark.parametrize(
    "text", ["", "# nothing", "h1 slots=0", "h1 slot=2", "h1 slots=2 max_slots=3", "-h1 slots=2", "h\nh"]
)
def test_malformed_host_files_are_refused(text):
    with pytest.raises(UsageError, match="HINT"):
        parse_hostfile(text, "f")


def test_hosts_are_found_by_a_script_or_set_by_a_program():
    assert HostDiscoveryScript("echo h1:2; echo h2", 3).find_available_hosts_and_slots() == {"h1": 2, "h2": 3}
    with pytest.raises(subprocess.CalledProcessError):
        HostDiscoveryScript("exit 3", 1).find_available_hosts_and_slots()
    with pytest.raises(UsageError, match="cannot read 'a b' in the output of the discovery script"):
        HostDiscoveryScript("echo a b", 1).find_available_hosts_and_slots()
    hosts = FixedHosts({"h1": 1})
    hosts.find_available_hosts_and_slots()["h2"] = 1
    assert hosts.find_available_hosts_and_slots() == {"h1": 1}
    hosts.set({"h2": 4})
    assert hosts.find_available_hosts_and_slots() == {"h2": 4}


def test_slots_count_local_ranks():
    slots = assign_slots([Host("a", 2), Host("b", 1), Host("c", 3)], 5)
    assert slots == [
        Placement("a", 0, 5, 0, 2),
        Placement("a", 1, 5, 1, 2),
        Placement("b", 2, 5, 0, 1),
        Placement("c", 3, 5, 0, 2),
        Placement("c", 4, 5, 1, 2),
    ]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_slots_are_a_numbering_of_ranks_and_of_each_group(counts, data):
    size = data.draw(st.integers(1, sum(counts)))
    slots = assign_slots([Host(f"h{index}", count) for index, count in enumerate(counts)], size)
    assert [slot.rank for slot in slots] == list(range(size))
    for host in {slot.host for slot in slots}:
        here = [slot for slot in slots if slot.host == host]
        assert [slot.local_rank for slot in here] == list(range(here[0].local_size))


def test_too_few_slots_are_refused():
    with pytest.raises(UsageError, match=r"-np 4 .* \(3\)"):
        assign_slots([Host("a", 2), Host("b", 1)], 4)
