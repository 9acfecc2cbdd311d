"""Keys and values for Horovod's engine: to clients of the job's hosts alone, and what was written first stays."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from hvdkit.environments.base import World
from hvdkit.environments.network import own_addresses
from hvdkit.transports.security.key_value_server import LARGEST_VALUE, KeyValueServer
from tests.waiting import until

REFUSED, FOUND, FORBIDDEN, NOT_FOUND, BAD = 409, 200, 403, 404, 400


@pytest.fixture
def meeting() -> Iterator[KeyValueServer]:
    served = KeyValueServer(World("by hand", 0, 2, 0, 2))
    yield served
    served.close()


def ask(
    meeting: KeyValueServer, method: str, key: str, value: bytes | None = None, **headers: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*meeting.address, timeout=10)
    try:
        connection.request(method, key, value, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_it_is_on_the_loopback_of_a_job_on_one_host(meeting):
    assert meeting.address[0] == "127.0.0.1"
    assert {"127.0.0.1"} <= set(own_addresses())


def test_nobody_is_let_in_but_clients_of_the_jobs_hosts(meeting, caplog):
    meeting.admit(["10.9.8.7"])
    assert ask(meeting, "GET", "/global/0")[0] == FORBIDDEN
    assert ask(meeting, "PUT", "/global/0", b"one")[0] == FORBIDDEN
    text = (
        "rank 0 refused a client at 127.0.0.1: no host of the job has this address, and only ranks may use the place "
        "where Horovod's engine meets. If the client is a rank behind network address translation (NAT), set "
        "HVDKIT_TRANSPORT=torch or mpi."
    )
    assert [record.getMessage() for record in caplog.records] == [text]
    meeting.admit(["10.9.8.7", "127.0.0.1"])
    assert ask(meeting, "GET", "/global/0")[0] == NOT_FOUND


def test_who_comes_before_it_is_known_who_takes_part_waits(meeting):
    answers = []
    client = threading.Thread(target=lambda: answers.append(ask(meeting, "GET", "/global/0")[0]))
    client.start()
    client.join(0.1)
    assert answers == []
    meeting.admit(own_addresses())
    client.join(10)
    assert answers == [NOT_FOUND]


def test_what_was_written_first_stays(meeting):
    meeting.admit(own_addresses())
    assert ask(meeting, "PUT", "/global/0", b"one")[0] == FOUND
    assert ask(meeting, "PUT", "/global/0", b"one")[0] == FOUND
    assert ask(meeting, "PUT", "/global/0", b"two")[0] == REFUSED
    assert ask(meeting, "DELETE", "/global/0")[0] == FOUND
    assert ask(meeting, "GET", "/global/0") == (FOUND, b"one")


def test_a_value_that_was_cut_off_may_be_sent_again(meeting):
    meeting.admit(own_addresses())
    with socket.create_connection(meeting.address, timeout=10) as client:
        client.sendall(b"PUT /global/0 HTTP/1.0\r\nContent-Length: 3\r\n\r\non")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100).startswith(b"HTTP/1.0 400 ")
    assert ask(meeting, "PUT", "/global/0", b"one")[0] == FOUND


def test_of_a_client_that_goes_away_nothing_is_said(meeting, capfd):
    meeting.admit(own_addresses())
    client = socket.create_connection(meeting.address, timeout=10)
    client.sendall(b"PUT /global/0 HTTP/1.0\r\nContent-Length: 3\r\n\r\non")
    until(handlers)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, and no orderly end
    client.close()
    for handler in handlers():
        handler.join(10)
    assert capfd.readouterr().err == ""
    assert ask(meeting, "PUT", "/global/0", b"one")[0] == FOUND


def handlers() -> list[threading.Thread]:
    """The threads that have a client each; one that is still being started is listed too, and cannot be joined yet."""
    return [thread for thread in threading.enumerate() if "process_request" in thread.name and thread.is_alive()]


def test_it_keeps_no_more_than_a_job_needs(meeting):
    meeting.admit(own_addresses())
    large = bytes(LARGEST_VALUE)
    assert ask(meeting, "PUT", "/a", large)[0] == FOUND
    assert ask(meeting, "PUT", "/b", large)[0] == REFUSED
    assert ask(meeting, "PUT", "/c", b"", **{"Content-Length": str(1 << 30)})[0] == BAD
    for number in range(31):
        assert ask(meeting, "PUT", f"/{number}", b"")[0] == FOUND
    assert ask(meeting, "PUT", "/one-more", b"")[0] == REFUSED
