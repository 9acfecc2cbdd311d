"""What Horovod has and hvdkit does not: scripts that ask for it are told what there is instead."""

from __future__ import annotations

HINTS = {
    "elastic": "hvdkit has no elastic jobs: save checkpoints, and start the job again from the last one.",
    "run": "start the job with hvdkitrun -np N python script.py; there is no function that starts one.",
    "runner": "start the job with hvdkitrun, which has horovodrun's flags.",
}


def attribute(module: str, name: str) -> AttributeError:
    """The error to raise where a module of Horovod's API is asked for what it does not have."""
    hint = f"\nHINT: {HINTS[name]}" if name in HINTS else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)
