"""Registers hvdkit as a backend of torch.distributed. PyTorch calls this when it is imported.

Nothing else of hvdkit is imported before the first group is made.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any
from urllib.parse import parse_qsl, urlsplit

BACKEND = "hvdkit"


def register() -> None:
    """Register the backend, and how ranks of mpirun and srun meet, once.

    An exception would break ``import torch``, so problems are only logged.
    """
    try:
        import torch.distributed as dist

        if dist.is_available() and BACKEND.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(BACKEND, new_group, extended_api=True, devices=["cpu"])
            # The attribute of dist with this name is a function. Torch's own register function replaces no handler.
            handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
            handlers["env"] = functools.partial(meet, handlers["env"])
    except Exception:
        logging.getLogger("hvdkit").debug(
            "hvdkit is not, or not completely, registered with torch.distributed", exc_info=True
        )


def meet(by_variables: Any, url: str, **options: Any) -> Any:
    """Return the iterator by which ranks meet: torch's, or hvdkit's where mpirun or srun set none of torch's variables.

    torch calls this in place of ``by_variables``, its own handler of ``env://``; ``url`` has the handler's arguments.
    """
    from hvdkit.environments import world_for_torch
    from hvdkit.environments.failure_record import tell_init

    tell_init()
    world = world_for_torch(dict(parse_qsl(urlsplit(url).query)))
    if world is None:
        return by_variables(url, **options)  # which says what is missing
    from hvdkit.torch.distributed.rendezvous import rendezvous

    return rendezvous(world, **options)


def new_group(options: Any, group_options: Any = None) -> Any:
    """Return a process group; torch.distributed calls this for each group."""
    from hvdkit.torch.distributed.process_group import new_group

    return new_group(options, group_options)
