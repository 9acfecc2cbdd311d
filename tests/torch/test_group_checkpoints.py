"""Checkpoints of torch.distributed on a group of hvdkit: whole states are sharded again, and saved beside training."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from tests.on_ranks import on_ranks
from tests.torch.optimizer_support import make_net, process_group

pytestmark = on_ranks(2)


def test_a_whole_state_of_rank_0_is_what_all_shards_load(hvd: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    def load_and_gather() -> None:
        whole = make_net(7).state_dict()
        net = fully_shard(make_net(1))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(net, whole if hvd.rank() == 0 else {}, options=options)
        gathered = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
        assert all(torch.equal(gathered[name], value) for name, value in make_net(7).state_dict().items())

    with process_group(hvd, "hvdkit"):
        load_and_gather()


def test_a_state_that_is_saved_beside_training_is_read_again(hvd: Any) -> None:
    folder = hvd.broadcast_object(tempfile.mkdtemp(), 0)
    with process_group(hvd, "hvdkit"):
        state = make_net(7).state_dict()
        dcp.async_save({"net": state}, checkpoint_id=folder).result()
        read = {"net": make_net(1).state_dict()}
        dcp.load(read, checkpoint_id=folder)
        assert all(torch.equal(read["net"][name], value) for name, value in state.items())
