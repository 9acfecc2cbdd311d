"""Batch normalisation over the batches of all ranks together, as if one process had all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hvdkit.api.job import Sum, size
from hvdkit.engine.ops.hints import STATISTICS
from hvdkit.torch.ops.allreduce import allreduce
from hvdkit.torch.ops.framework import apply
from hvdkit.torch.ops.gather import allgather


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of inputs of shape (N, C, ...) with statistics of all ranks' batches, on CPU and GPU.

    Batches may differ in size between ranks and be empty on some. While training, and without running statistics also
    in evaluation, every rank must call the module equally often. The gradients of weight and bias are those of this
    rank's batch. Arguments are those of ``torch.nn.BatchNorm2d``:

    Args:
        num_features: the number of channels, C.
        eps: added to the variance.
        momentum: of the running statistics; None for their plain average.
        affine: True for a weight and a bias per channel.
        track_running_stats: True to keep statistics for evaluation.
        device: of parameters and buffers.
        dtype: of parameters and buffers.

    Raises:
        ValueError: by a call, for inputs of fewer than two dimensions, of other channels, or with one value a channel.

    Examples:
        >>> norm = hvd.SyncBatchNorm(1)
        >>> output = norm(torch.full((3, 1), 2.0 * hvd.rank()))  # the mean of all ranks' batches is 1
        >>> output.round().tolist()  # on rank 1: [[1.0], [1.0], [1.0]]
        [[-1.0], [-1.0], [-1.0]]
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (N, C, ...); the result has its shape and type."""
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm: expected {self.num_features} channels, got input of {input.shape[1]}")
        momentum = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        use_batch = self.training or self.running_mean is None
        running = (self.running_mean, self.running_var)
        if use_batch and not (self.training and self.track_running_stats):
            running = (None, None)
        if not use_batch or size() == 1:
            affine = (self.weight, self.bias)
            return nn.functional.batch_norm(input, *running, *affine, use_batch, momentum or 0.0, self.eps)
        return self._synchronized(input, running, momentum)

    @_disable_dynamo  # a compiled model must not trace code that waits for other ranks
    def _synchronized(self, input: Tensor, running: Any, momentum: float | None) -> Tensor:
        output: Tensor = apply(SyncBatchNormFunction, input, self.weight, self.bias, self.eps, *running, momentum)
        return output

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module) -> nn.Module:
        """Replace every batch normalisation in a module; parameters and buffers are shared, not copied.

        Args:
            module: a torch.nn.Module, which is changed.

        Returns:
            The module itself, or its replacement if it is a batch normalisation.

        Raises:
            ValueError: for a lazy batch normalisation that has not seen an input yet.
            TypeError: unless it is a module.

        Examples:
            >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
            >>> type(hvd.SyncBatchNorm.convert_sync_batchnorm(model)[1]).__name__
            'SyncBatchNorm'
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"convert_sync_batchnorm: module must be a torch.nn.Module, got {module!r}")
        if not isinstance(module, _BatchNorm) or isinstance(module, cls):
            for name, child in module.named_children():
                module.add_module(name, cls.convert_sync_batchnorm(child))
            return module
        if any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            raise ValueError(
                f"convert_sync_batchnorm: {type(module).__name__} must be initialized, got a layer that has seen "
                "no input\nHINT: run the model once before you convert it."
            )
        arguments = (module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        converted = cls(*arguments, device="meta")  # every tensor is replaced below
        for name, parameter in module._parameters.items():  # None where there is no bias
            converted.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            converted.register_buffer(name, buffer)
        converted.train(module.training)
        return converted


def _broadcastable(channels: Tensor, input: Tensor) -> Tensor:
    """Return a vector of a value per channel in a shape that broadcasts with ``input``."""
    return channels.reshape(1, -1, *([1] * (input.dim() - 2)))


def _combine(statistics: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return mean, variance and count of all ranks' values from each rank's row [count, means, variances], in float64.

    Deviations from each rank's own mean are added up, then those of the means (Chan et al., 1983), so that nothing
    cancels if the mean is large compared to the deviation.
    """
    counts = statistics[:, :1]
    means, variances = statistics[:, 1:].chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(dim=0) / count
    variance = (counts * (variances + (means - mean).square())).sum(dim=0) / count
    return mean, variance, float(count)


class SyncBatchNormFunction(torch.autograd.Function):
    """Normalisation with one exchange of statistics forward and one backward.

    ``forward`` updates the running statistics, as PyTorch's own kernel does: ``torch.utils.checkpoint`` may end its
    second forward pass before code after ``apply`` runs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float | None,
    ) -> Tensor:
        """Return the output and update the running statistics, if there are any, with all ranks' values."""
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        over = [dimension for dimension in range(input.dim()) if dimension != 1]
        channels = input.shape[1]
        own_count = input.numel() // channels if channels else 0
        variance = mean = torch.zeros(channels, dtype=wide, device=input.device)
        if own_count:
            variance, mean = torch.var_mean(input.to(wide), dim=over, correction=0)
        row = torch.cat([mean.new_tensor([own_count]).double(), mean.double(), variance.double()])
        mean, variance, count = _combine(allgather(row.unsqueeze(0), name=f"sync_batch_norm{STATISTICS}"))
        if count <= 1:
            raise ValueError(
                "SyncBatchNorm: Expected more than 1 value per channel when training, got "
                f"{int(count)} over all ranks, with input of shape {tuple(input.shape)} on this one"
            )
        mean, variance = mean.to(wide), variance.to(wide)
        for running, batch in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None and momentum is not None:
                running.lerp_(batch.to(running.dtype), momentum)
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps))
        ctx.count, ctx.over = count, over
        ctx.bias_dtype = None if bias is None else bias.dtype
        scale, shift = (None if each is None else each.to(wide) for each in (weight, bias))
        return nn.functional.batch_norm(input.to(wide), mean, variance, scale, shift, eps=eps).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return the gradients of input, weight and bias, and None for the other arguments."""
        input, weight, mean, inverse_deviation = ctx.saved_tensors
        gradient = grad_output.to(mean.dtype)
        centered = input.to(mean.dtype) - _broadcastable(mean, input)
        sum_gradient = gradient.sum(dim=ctx.over)
        sum_product = (gradient * centered).sum(dim=ctx.over)
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_gradient, sum_product]).double()
            sums = allreduce(sums, name="sync_batch_norm.gradient_sums", op=Sum)
            mean_gradient, mean_product = (sums / ctx.count).to(mean.dtype).chunk(2)
            scale = inverse_deviation if weight is None else inverse_deviation * weight
            wide_input = gradient - _broadcastable(mean_gradient, input)
            wide_input.addcmul_(centered, _broadcastable(mean_product * inverse_deviation.square(), input), value=-1)
            grad_input = wide_input.mul_(_broadcastable(scale, input)).to(input.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = (sum_product * inverse_deviation).to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = sum_gradient.to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None
