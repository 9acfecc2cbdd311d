"""Acting when a module is imported, be it now or later."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class _Finder(MetaPathFinder):
    """Finds nothing itself; the first time that the module is found by others, the action follows its import."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute, action = spec.loader.exec_module, self._action

        def execute_and_act(module: Any) -> None:
            execute(module)
            action()

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` when the module ``name`` has been imported: now if it was, else once when it is."""
    if name in sys.modules:
        action()
    elif not any(isinstance(finder, _Finder) and finder._name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, action))
