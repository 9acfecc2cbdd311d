"""Names and groups of parameters, without a rank."""

from __future__ import annotations

import pytest
import torch

from hvdkit.api.gradients.planning import check_groups, form_groups
from hvdkit.torch.gradients.names import check_names


def test_unnamed_parameters_are_named_by_place() -> None:
    tensors = [torch.zeros(1) for _ in range(3)]
    names = check_names(None, [{"params": tensors[:2]}, {"params": tensors[2:]}])
    assert [name for name, _ in names] == ["allreduce.noname.0.0", "allreduce.noname.0.1", "allreduce.noname.1.0"]


def test_names_may_be_more_than_the_optimizer_has() -> None:
    tensors = [torch.zeros(1) for _ in range(3)]
    pairs = [(str(i), tensor) for i, tensor in enumerate(tensors)]
    assert check_names(iter(pairs), [{"params": tensors[:2]}]) == pairs


@pytest.mark.parametrize("groups", [0, -2, 1.5, "two", [[torch.zeros(1), 3]]])
def test_groups_that_make_no_sense_are_value_errors(groups: object) -> None:
    with pytest.raises(ValueError, match="groups"):
        check_groups("DistributedOptimizer", groups, "torch.Tensor", torch.is_tensor)


def test_groups_of_one_and_absent_members_are_left_out() -> None:
    a, b, c, absent = (torch.zeros(1) for _ in range(4))
    formed = form_groups([a, b, c], [[a, absent], [b, c]])
    assert [[id(member) for member in group] for group in formed] == [[id(b), id(c)]]
    assert form_groups([a, b, c], 3) == []
    assert form_groups([a, b, c], None) == []
