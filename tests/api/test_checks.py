"""Arguments that are checked alike for all frameworks."""

from __future__ import annotations

from types import SimpleNamespace

from hvdkit.api.checks import check_variables
from tests.told import told


def test_a_variable_without_a_value_is_refused():
    variables = [SimpleNamespace(assign=None, shape=(3,)), SimpleNamespace(assign=None, shape=None)]
    hint = "build the model first, by model.build(), by running a batch, or by optimizer.build(variables)."
    with told(ValueError, f"broadcast_variables: variables[1] has no value yet\nHINT: {hint}"):
        check_variables("broadcast_variables", variables)
