"""Codecs are called as docs/compression.md says, in every framework: all have the codecs of one class."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from hvdkit.api.gradients.compression import Compressions
from hvdkit.compression import LossyCodec

ROOT = Path(__file__).resolve().parents[2]
LOSSY = {name: kind for name, kind in inspect.getmembers(Compressions, inspect.isclass) if issubclass(kind, LossyCodec)}
# A codec without parameters has a dash in their place.
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (`\w+=.*|-) \| [A-Z].* \|$", re.MULTILINE)
# Given by name, to all of them; the text above the table has them.
COMMON = {"feedback": True, "compress": "between_nodes"}


def documented() -> dict[str, dict[str, object]]:
    """By codec: the parameters and defaults of the table, in its order."""
    rows = ROW.findall((ROOT / "docs" / "compression.md").read_text())
    return {
        name: {parameter: ast.literal_eval(value) for parameter, value in re.findall(r"`(\w+)=([^`]*)`", parameters)}
        for names, parameters in rows
        for name in re.findall(r"\w+", names)
    }


def test_a_codec_without_parameters_has_a_row_too():
    assert ROW.findall("| `sign` | - | Bernstein et al., 2018 |") == [("`sign`", "-")]


def test_the_table_has_all_codecs():
    assert documented().keys() == LOSSY.keys()


@pytest.mark.parametrize("name", LOSSY)
def test_parameters_defaults_and_order_are_those_of_the_table(name):
    parameters = inspect.signature(LOSSY[name]).parameters
    table = documented()[name]
    assert {one.name: one.default for one in parameters.values()} == table | COMMON
    by_place = [one.name for one in parameters.values() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert by_place == list(table)[: len(by_place)]


def test_parameters_that_the_documentation_gives_by_place_are_there():
    calls = re.findall(r"`(\w+)\(([\w, ]+)\)`", (ROOT / "docs" / "compression.md").read_text())
    calls = [(name, given.split(", ")) for name, given in calls if name in LOSSY]
    assert ("dgc", ["ratio", "momentum"]) in calls
    for name, given in calls:
        by_place = list(inspect.signature(LOSSY[name]).parameters)[: len(given)]
        # A single letter stands for the parameter that is named like the codec.
        assert by_place == [name if len(one) == 1 else one for one in given]
