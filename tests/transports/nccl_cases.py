"""What NCCL must give on two ranks with a GPU each."""

from __future__ import annotations

import torch

from hvdkit.engine.life import runtime


def case_operations_on_cuda(hvd):
    torch.cuda.set_device(hvd.local_rank())
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
        own = torch.full((1000,), rank + 1, dtype=dtype, device="cuda")
        assert hvd.allreduce(own, op=hvd.Sum).eq(size * (size + 1) // 2).all()
        assert hvd.allreduce(own, op=hvd.Max).eq(size).all()
        assert hvd.broadcast(own, 1).eq(2).all()
        gathered = hvd.allgather(own[: rank + 1])
        assert gathered.device == own.device
        assert gathered.tolist() == [other + 1 for other in range(size) for _ in range(other + 1)]
    assert any(runtime.engine().groups._device_collectives.values())


def case_a_model_on_cuda_trains_as_on_the_cpu(hvd):
    torch.cuda.set_device(hvd.local_rank())
    results = []
    for device in ("cpu", "cuda"):
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(50, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 10))
            model.to(device)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01),
                named_parameters=model.named_parameters(),
                compression=compression,
            )
            for step in range(5):
                batch = torch.randn(8, 50, generator=torch.Generator().manual_seed(step * 100 + hvd.rank()))
                optimizer.zero_grad()
                model(batch.to(device)).square().mean().backward()
                optimizer.step()
            results.append(torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()]))
            everyones = hvd.allgather(results[-1].view(1, -1))
            assert torch.equal(everyones[0], everyones[-1])
            assert any(lane.on_device for lane in runtime.engine().lanes.values()) == (device == "cuda")
            del model, optimizer
    torch.testing.assert_close(results[2], results[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(results[3], results[1], rtol=1e-2, atol=1e-3)


def case_lossy_codecs_encode_on_cuda(hvd):
    torch.cuda.set_device(hvd.local_rank())
    for name in ("int8", "int4", "onebit", "topk", "dgc", "powersgd"):
        codec = getattr(hvd.Compression, name)(compress="everywhere")
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 200).cuda()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=codec
        )
        for step in range(5):
            batch = torch.randn(8, 300, generator=torch.Generator().manual_seed(step * 100 + hvd.rank()))
            optimizer.zero_grad()
            model(batch.cuda()).square().mean().backward()
            optimizer.step()
        lane = list(runtime.engine().lanes.values())[-1]
        assert lane.on_device
        assert hvd.compression_stats().by_parameter["weight"].bytes_after
        weights = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
        assert torch.isfinite(weights).all()
        everyones = hvd.allgather(weights.view(1, -1))
        assert torch.equal(everyones[0], everyones[-1])
        del model, optimizer, lane


def case_a_rank_that_joined_contributes_zeros(hvd):
    torch.cuda.set_device(hvd.local_rank())
    if hvd.rank() == 0:
        assert hvd.allreduce(torch.ones(4, device="cuda"), op=hvd.Sum, name="alone").tolist() == [1.0] * 4
    hvd.join()


def case_init_again_makes_new_communicators(hvd):
    for _ in range(3):
        hvd.shutdown()
        hvd.init()
        torch.cuda.set_device(hvd.local_rank())
        assert hvd.allreduce(torch.ones(4, device="cuda"), op=hvd.Sum).tolist() == [hvd.size()] * 4
