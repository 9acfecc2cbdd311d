"""Batch normalisation for Keras over the batches of all ranks together, as if one process had them all."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.job import Sum
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.tensorflow.ops.bridge import as_written
from hvdkit.tensorflow.ops.reductions import allreduce

_REFUSED = {
    "fused": "TensorFlow's fused kernel cannot use the statistics of all ranks.\nHINT: leave fused out.",
    "renorm": "it compensates for small batches, but here the batch is that of all ranks.\nHINT: leave renorm out.",
    "virtual_batch_size": "statistics are those of all batches.\nHINT: leave it out, or use Keras' BatchNormalization.",
    "synchronized": "it is for tf.distribute, but here ranks are synchronised.\nHINT: leave synchronized out.",
}


@tf.keras.utils.register_keras_serializable(package="hvdkit")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """A batch normalisation that uses the statistics of the batches of all ranks of ``process_set`` while training.

    Batches and masks may differ between ranks, and be empty on some. Each value counts once. Every rank of the set
    calls the layer equally often while training, and the layer has the same name on all of them. On a rank that is not
    in the set, or alone in it, this is the layer of Keras. The gradients of gamma and beta are this rank's, and are
    reduced like all others. A layer made from a configuration has the process set of all ranks. Inputs have any shape
    and a floating dtype.

    Args:
        axis: the dimension of the channels, or several dimensions.
        process_set: the ranks that take part.
        fused: False; taken for compatibility.
        others: those of ``keras.layers.BatchNormalization``, of Keras 3 or of tf_keras, whichever ``tf.keras`` is.

    Raises:
        ValueError: for ``fused``, ``renorm``, ``virtual_batch_size`` and ``synchronized``.
        ValueError, NotInitializedError: in training, for a set that is not registered, and before init().
        HorovodInternalError: in training, on every rank where ranks disagree on the shape of the statistics.

    Examples:
        >>> norm = hvd.SyncBatchNormalization(name="norm")
        >>> output = norm(tf.fill([3, 1], 2.0 * hvd.rank()), training=True)  # the mean of all ranks' is 1
        >>> output.numpy().round().tolist()  # on rank 1: [[1.0], [1.0], [1.0]]
        [[-1.0], [-1.0], [-1.0]]
    """

    def __init__(
        self, axis: Any = -1, *, process_set: ProcessSet = global_process_set, fused: bool | None = False, **others: Any
    ) -> None:
        given = {"fused": fused is None or fused, **others}
        for option, reason in _REFUSED.items():
            if given.get(option):
                raise ValueError(f"SyncBatchNormalization does not support {option}: {reason}")
        others.pop("virtual_batch_size", None)  # which Keras 3 does not know
        if hasattr(tf.keras.layers.BatchNormalization, "_fused_batch_norm"):  # Keras 2 would choose the fused kernel
            others["fused"] = False
        super().__init__(axis=axis, **others)
        self.process_set = process_set
        self.supports_jit = False  # or model.compile() would choose XLA, which cannot talk to other processes

    @as_written
    def _moments(self, inputs: Any, *positional: Any, **options: Any) -> tuple[Any, Any]:
        """Return the mean and the variance of each channel, in the dtype of ``inputs``.

        Keras 3 calls this with the mask; tf_keras with the axes, then ``keep_dims`` and ``mask`` by name.
        """
        checks.check_registered("SyncBatchNormalization", self.process_set)
        is_alone = checks.size_of(self.process_set) == 1 and (tf.executing_eagerly() or not runtime.is_elastic())
        if not self.process_set.included() or is_alone:
            moments: tuple[Any, Any] = super()._moments(inputs, *positional, **options)
            return moments
        mask = options["mask"] if "mask" in options else positional[0]
        axes = [self.axis] if isinstance(self.axis, int) else self.axis
        channels = {axis % inputs.shape.rank for axis in axes}
        over = [dimension for dimension in range(inputs.shape.rank) if dimension not in channels]
        sums = allreduce(
            _local_sums(inputs, over, mask),
            op=Sum,
            name=f"{self.name}.statistics",
            process_set=self.process_set,
            ignore_name_scope=True,
        )
        count, total, squares = tf.unstack(sums)
        mean = tf.math.divide_no_nan(total, count)
        variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
        mean, variance = tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
        if len(channels) == 1:
            return tf.squeeze(mean, over), tf.squeeze(variance, over)
        return mean, variance


def _local_sums(inputs: Any, over: list[int], mask: Any) -> Any:
    """Return the counts, sums and sums of squares of this rank's values, stacked; the dimensions ``over`` are 1.

    They are float64, so that their difference is the variance even where the mean is large against the deviation. The
    large tensors stay in their dtype: values are shifted by about this rank's mean before they are summed.
    """
    shape = tf.shape(inputs, tf.int64)
    if mask is not None:
        mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], shape)

    def unmasked(values: Any) -> Any:
        return values if mask is None else tf.where(mask, values, tf.zeros([], values.dtype))

    total = tf.reduce_sum(unmasked(inputs), over, keepdims=True)
    if mask is None:
        count = tf.reduce_prod(tf.gather(shape, over)) * tf.ones_like(total, tf.int64)
    else:
        count = tf.math.count_nonzero(mask, over, keepdims=True)
    # The sums do not depend on the shift, which therefore has no gradient of any order.
    shift = tf.stop_gradient(tf.math.divide_no_nan(total, tf.cast(count, inputs.dtype)))
    shifted = unmasked(inputs - shift)
    rest = tf.cast(tf.reduce_sum(shifted, over, keepdims=True), tf.float64)
    squares = tf.cast(tf.reduce_sum(tf.square(shifted), over, keepdims=True), tf.float64)
    count, shift = tf.cast(count, tf.float64), tf.cast(shift, tf.float64)
    return tf.stack([count, count * shift + rest, squares + 2.0 * shift * rest + count * tf.square(shift)])
