"""Checks of ``make lint`` beside the linters: import cycles, first words of docstrings, names of variables and classes.

python -m tests.suite.readable
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path("hvdkit")
# A reader has to decode a docstring that begins so; it begins with a verb or with the noun for the thing.
UNCLEAR_FIRST_WORDS = {"What", "Whether", "How", "One", "Where", "Of", "Which", "Those", "Who"}
UNCLEAR_NAMES = {"one", "told", "asked", "mine", "ours", "theirs", "found", "known"}
# Horovod's public names, which each adapter has.
PUBLIC_TWICE = {
    "BF16Compressor",
    "BroadcastGlobalVariablesCallback",
    "Compression",
    "FP16Compressor",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def import_cycle() -> list[str]:
    """Return the modules of an import cycle, also of imports inside functions; an empty list if there is none."""
    graph = grimp.build_graph("hvdkit", exclude_type_checking_imports=True)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    # A module may import the package that contains it.
    apart = {name: {other for other in others if not name.startswith(f"{other}.")} for name, others in imported.items()}
    try:
        TopologicalSorter(apart).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def unclear_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the complaint for each docstring and variable of a module that a reader has to decode."""
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].strip(",.:;`'") in UNCLEAR_FIRST_WORDS:
                yield getattr(node, "lineno", 1), f"docstring begins with {words[0]!r}"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in UNCLEAR_NAMES:
            yield node.lineno, f"variable {node.id!r}"
        elif isinstance(node, ast.arg) and node.arg in UNCLEAR_NAMES:
            yield node.lineno, f"argument {node.arg!r}"


def complaints() -> Iterator[str]:
    """Yield a line for each thing that must be changed."""
    defined: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        yield from (f"{path}:{line}: {text}" for line, text in unclear_words(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in PUBLIC_TWICE:
                defined[node.name].append(f"{path}:{node.lineno}")
    yield from (f"class {name} twice: {', '.join(at)}" for name, at in defined.items() if len(at) > 1)
    if cycle := import_cycle():
        yield f"import cycle: {' -> '.join(cycle)}"


if __name__ == "__main__":
    lines = list(complaints())
    print(*lines or ["no import cycle, no unclear first word or name, no class name twice"], sep="\n")
    sys.exit(bool(lines))
