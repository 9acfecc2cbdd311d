"""How ranks find rank 0's store at horovodrun's key-value server."""

from __future__ import annotations

import os
import sys

import pytest

from hvdkit.environments.base import Rendezvous, World
from hvdkit.environments.network import own_addresses
from hvdkit.errors import AuthenticationError, TransportUnavailableError
from hvdkit.transports.security.credentials import Credentials
from hvdkit.transports.security.key_value_server import KeyValueServer
from hvdkit.transports.security.rendezvous import _parsed_rendezvous, _rendezvous_by_http
from tests.ranks import TORCH, run_ranks
from tests.told import told

SECRET = Credentials(b"a secret of this job", "job", 1)


def world(rank: int) -> World:
    return World("horovodrun", rank, 2, rank, 2)


@pytest.fixture
def server():
    """A key-value server such as horovodrun has, behind a proxy that leads nowhere."""
    meeting = KeyValueServer(world(0))
    meeting.admit(own_addresses())
    yield Rendezvous("http", *meeting.address)
    meeting.close()


def meet(rank: int, server: Rendezvous, credentials: Credentials | None, seconds: float = 10) -> tuple[str, int]:
    found = _rendezvous_by_http(world(rank), server, "hvdkit/job/1", credentials, seconds)
    if found.listen_fd is not None:
        os.close(found.listen_fd)
    return found.host, found.port


@pytest.mark.parametrize("credentials", [None, SECRET])
def test_the_others_find_what_rank_0_wrote_and_no_proxy_is_asked(server, credentials, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    served = meet(0, server, credentials)
    assert meet(1, server, credentials) == served


def test_what_was_written_without_the_secret_is_refused(server):
    meet(0, server, None)
    fact = "was not written by a rank that knows the secret of rank 1.\n"
    hint = "HINT: give all ranks the same HVDKIT_SECRET_FILE, or none; see SECURITY.md."
    with told(AuthenticationError, f"the text at http://127.0.0.1:{server.port}/", fact + hint):
        meet(1, server, SECRET)


def test_what_is_no_address_is_told():
    hint = "HINT: another program wrote this; give the ranks an HVDKIT_SECRET_FILE, see SECURITY.md."
    with told(TransportUnavailableError, f"expected the address of rank 0's store, got b'nonsense'\n{hint}"):
        _parsed_rendezvous(b"nonsense")


def test_a_server_that_is_gone_is_told_at_once(server):
    gone = Rendezvous("http", "127.0.0.1", 9)
    for rank in (0, 1):
        with pytest.raises(TransportUnavailableError, match=f"rank {rank} cannot use horovodrun's .*127.0.0.1:9/"):
            meet(rank, gone, None)


def test_a_rank_0_that_writes_nothing_is_told(server):
    with pytest.raises(TransportUnavailableError, match="rank 0 did not publish its store"):
        meet(1, server, None, seconds=0.3)


PART_OF_MPIS_RANKS = """
import os
import torch
import hvdkit.torch as hvd

if os.environ["OMPI_COMM_WORLD_RANK"] != "0":
    for _ in range(2):
        hvd.init(comm=[1, 2])
        print("sum", hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), hvd.rank(), hvd.size())
        hvd.shutdown()
"""


def test_mpi_tells_some_of_its_ranks_where_they_meet_and_rank_0_need_not_be_one():
    command = [sys.executable, "-c", f"import mpi4py.MPI{PART_OF_MPIS_RANKS}"]
    status, output = run_ranks(command, 3, "mpi", 60, preload=TORCH, HVDKIT_TRANSPORT="torch")
    assert status == 0, output
    assert [output.count(f"sum 2.0 {rank} 2") for rank in range(2)] == [2, 2], output
