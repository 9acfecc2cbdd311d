"""The parts that the adapters of all frameworks share: the job, operations by name, checks of arguments, objects."""

from __future__ import annotations

# Parts of Horovod's API that hvdkit lacks, each with the replacement to suggest.
HINTS = {
    "run": "hvdkit.run(function, args, np=N), of the package hvdkit itself, runs a function on new ranks.",
    "runner": "start the job with hvdkitrun, which has horovodrun's flags.",
}


def missing_attribute(module: str, name: str) -> AttributeError:
    """Return the error to raise when ``module``, of Horovod's API, lacks the attribute ``name``."""
    hint = f"\nHINT: {HINTS[name]}" if name in HINTS else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)
