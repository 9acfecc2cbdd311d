"""Stands in for a rank that a server of tests/preloaded.py forks: asks for it, waits for it and ends as it does."""

import json
import os
import signal
import socket
import struct
import sys
import time

STARTED_WITHIN_SECONDS = 120  # what the server imports takes seconds, on a slow machine many

addresses, name, arguments = sys.argv[1:3], sys.argv[3], sys.argv[4:]
rank = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
place = {"arguments": arguments, "name": name, "folder": os.getcwd(), "environment": dict(os.environ)}
request = json.dumps(place).encode() + b"\0"
server = socket.socket(socket.AF_UNIX)
deadline = time.monotonic() + STARTED_WITHIN_SECONDS
while True:
    try:
        server.connect(addresses[rank % len(addresses)])
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.05)
# hvdkitrun hands rank 0 a socket that listens already.
listener = os.environ.get("HVDKIT_RENDEZVOUS_FD")
sent = socket.send_fds(server, [request], [0, 1, 2, *([int(listener)] if listener else [])])
if sent < len(request):  # else the rank may have ended already, and nobody be there any more
    server.sendall(request[sent:])
status = struct.unpack("i", server.recv(4) or struct.pack("i", 1))[0]
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
