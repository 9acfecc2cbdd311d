"""A store whose values are sealed with the session's secret, and a plain store beside it for NCCL."""

from __future__ import annotations

from datetime import timedelta
from time import sleep
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hvdkit.errors import AuthenticationError
from hvdkit.transports.security.credentials import Credentials, NotAuthenticError
from hvdkit.transports.security.listening import listen

STRANGERS = (
    "HINT: give all ranks the same HVDKIT_SECRET_FILE, or none; if they have it, somebody else is on this network, "
    "see SECURITY.md."
)


def pause(waited_seconds: float) -> None:
    """Sleep between two looks at a store for an eighth of the wait, so that looking adds no more than that."""
    sleep(min(max(waited_seconds / 8, 0.002), 0.25))


class SealedStore(Store):
    """A store whose values are sealed. A value that is not authentic is refused before anything reads it."""

    def __init__(self, store: Any, prefix: str, credentials: Credentials) -> None:
        super().__init__()
        self.bare = PrefixStore(prefix, store)
        self._below = store  # kept, since it may be an object of Python
        self.plain: Any = None  # for threads of C++, which call a store and may outlive Python
        self._prefix = prefix
        self._credentials = credentials

    def set(self, key: str, value: str | bytes) -> None:
        plain = value.encode() if isinstance(value, str) else value
        self.bare.set(key, self._credentials.seal(f"{self._prefix}/{key}", plain))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return unseal_at(key, self._credentials, f"{self._prefix}/{key}", self.bare.get(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self.bare.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.bare.wait(keys, *([] if timeout is None else [timeout]))


def unseal_at(key: str, credentials: Credentials, label: str, sealed: bytes) -> bytes:
    """Return the value that a rank has sealed with a label, and put at a key. Raises AuthenticationError."""
    try:
        return credentials.unseal(label, sealed)
    except NotAuthenticError:
        raise AuthenticationError(
            f"what is at {key!r} in the store where the ranks meet was not written by a rank.\n{STRANGERS}"
        ) from None


def plain_store(store: Any) -> Any:
    """Return the plain store beside a sealed one, else the store itself."""
    return store.plain if isinstance(store, SealedStore) else store


def serve_plain(store: SealedStore, address: str) -> Any:
    """Serve a TCPStore for ``store.plain`` on a port of its own, which the other ranks learn from ``store``."""
    listener = listen(address)
    host, port = listener.getsockname()[:2]
    plain = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    store.set("plain", f"{host} {port}")
    store.plain = PrefixStore("plain", plain)
    return plain


def join_plain(store: SealedStore, timeout_seconds: float) -> Any:
    """Connect to the store that ``serve_plain`` serves, for ``store.plain``."""
    store.wait(["plain"], timedelta(seconds=timeout_seconds))
    host, port = store.get("plain").decode().split()
    plain = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    store.plain = PrefixStore("plain", plain)
    return plain
