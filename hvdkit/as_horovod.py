"""Horovod's module names for hvdkit's modules, for scripts that ``import horovod.torch`` and stay unedited."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import hvdkit
from hvdkit import api

HOROVOD_VERSION = "0.28.1"  # the release with this API; scripts compare it

# The folder that hvdkitrun --as-horovod puts first on PYTHONPATH: its package horovod calls install().
FOLDER = Path(__file__).with_name("horovod_path")

_ADAPTERS = ("", ".compression", ".functions", ".mpi_ops", ".sync_batch_norm")
# Horovod's modules, each with hvdkit's module that takes its place.
MODULES = {
    **{f"horovod.torch{name}": f"hvdkit.torch{name}" for name in (*_ADAPTERS, ".optimizer")},
    **{f"horovod.tensorflow{name}": f"hvdkit.tensorflow{name}" for name in _ADAPTERS},
    "horovod.tensorflow.keras": "hvdkit.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "hvdkit.tensorflow.keras.callbacks",
    "horovod.keras": "hvdkit.keras",
    "horovod.keras.callbacks": "hvdkit.keras.callbacks",
    **dict.fromkeys(("horovod.data", "horovod.data.data_loader_base"), "hvdkit.data"),
    **{f"horovod.torch.elastic{name}": f"hvdkit.torch.elastic{name}" for name in ("", ".sampler", ".state")},
    **{f"horovod.{name}.elastic": f"hvdkit.{name}.elastic" for name in ("keras", "tensorflow", "tensorflow.keras")},
    "horovod.common.elastic": "hvdkit.api.elastic",
    "horovod.common.exceptions": "hvdkit.errors",
    "horovod.common.process_sets": "hvdkit.engine.session.process_sets",
    "horovod.common.util": "hvdkit.api.horovod_util",
    "horovod.runner.elastic.discovery": "hvdkit.launch.elastic.discovery",
}
_EMPTY = ("horovod.common", "horovod.runner", "horovod.runner.elastic")  # packages of such modules


def install() -> None:
    """Make ``import horovod`` and its parts give hvdkit's modules in this process. A second call does nothing.

    Raises RuntimeError if another Horovod was imported before.
    """
    imported = sys.modules.get("horovod")
    if isinstance(imported, _Horovod):
        return
    if imported is not None and getattr(imported, "__file__", None) != str(FOLDER / "horovod" / "__init__.py"):
        raise RuntimeError(
            f"hvdkit.install_as_horovod(): {getattr(imported, '__file__', 'horovod')} was imported before.\n"
            "HINT: call it first in the program, or start the job with hvdkitrun --as-horovod."
        )
    finder = _Finder()
    sys.modules["horovod"] = _Horovod(finder)
    sys.meta_path.insert(0, finder)


class _Horovod(ModuleType):
    """The package ``horovod``."""

    def __init__(self, finder: _Finder) -> None:
        super().__init__("horovod", __doc__)
        self.__version__ = HOROVOD_VERSION
        self.__file__ = __file__
        self.__path__ = []
        self.__spec__ = ModuleSpec("horovod", finder, is_package=True)

    @staticmethod
    def run(*args: Any, **named: Any) -> list[Any]:
        """Run a function on all ranks of a new job, as ``hvdkit.run`` does."""
        results: list[Any] = hvdkit.run(*args, **named)
        return results


class _Finder(MetaPathFinder, Loader):
    """The finder of modules with Horovod's names, ahead of all other finders."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname in MODULES or fullname == "horovod" or fullname in _EMPTY:
            return ModuleSpec(fullname, self, is_package=True)
        package, *names = fullname.split(".")
        hints = [api.HINTS[name] for name in names if name in api.HINTS]
        if package == "horovod" and hints:
            text = f"horovod is hvdkit here, which has no {fullname}\nHINT: {hints[-1]}"
            raise ModuleNotFoundError(text, name=fullname)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put hvdkit's own module, untouched, in the place of this module."""
        name = module.__name__
        if name in MODULES:
            sys.modules[name] = importlib.import_module(MODULES[name])
        elif name == "horovod" and not isinstance(module, _Horovod):
            sys.modules[name] = _Horovod(self)
