"""What a distributed optimizer does in place of its own update: reduce the gradients, then update."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from hvdkit.api.gradients.guard import WATCH, is_marked
from hvdkit.keras import keras_2
from hvdkit.keras.early import begin_backward
from hvdkit.keras.step import distributed_step, step_of

SKIPPED = (
    "The optimizer '{name}' was told that its gradients are summed already ({flag}), and nothing in this process has "
    "summed them: ranks may train different models.\n"
    "HINT: leave the argument out, or call optimizer.aggregate_gradients() before."
)


class Applying:
    """Comes before the class of an optimizer of Keras 3."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce the gradients over all ranks, and update the variables. Collective."""
        apply_reduced(self, grads, trainable_variables, super().apply)  # type: ignore[misc]

    apply.reduces_first = True  # type: ignore[attr-defined]

    def scale_loss(self: Any, loss: Any) -> Any:
        """The loss, scaled as by its class."""
        scaled = super().scale_loss(loss)  # type: ignore[misc]
        begin_backward(self, sys._getframe(1).f_code)
        return scaled


class ApplyingPairs:
    """Comes before the class of an optimizer of Keras 2, be it one since 2.11 or an older one."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        """Reduce the gradients over all ranks, and update the variables. Collective."""
        apply = super().apply_gradients  # type: ignore[misc]
        return apply_pairs(self, grads_and_vars, lambda pairs: apply(pairs, *args, **options), keras_2.skips(options))

    def aggregate_gradients(self: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """Reduce the gradients over all ranks, for apply_gradients(..., skip_gradients_aggregation=True)."""
        pairs = list(grads_and_vars)
        if WATCH.inside or not pairs:
            return pairs
        grads, variables = zip(*pairs, strict=True)
        reduced = step_of(self).reduce(grads, variables)
        WATCH.seen(variables)
        return list(zip(reduced, variables, strict=True))

    _aggregate_gradients = aggregate_gradients  # as optimizers before 2.11 call it


def apply_reduced(optimizer: Any, grads: Any, trainable_variables: Any, apply: Any) -> None:
    """The step of an optimizer that is distributed, has a distributed one inside, or neither."""
    step = None if WATCH.inside else distributed_step(optimizer)  # if it is, one around this one has reduced them
    if step is None:
        apply(grads, trainable_variables)
        return
    variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
    grads = list(grads)
    if len(grads) != len(variables):
        apply(grads, trainable_variables)  # which says what is wrong
        return
    if not optimizer.built and grads:
        # Outside of branches of a graph, where no variable can be made.
        optimizer.build(variables)
        optimizer.built = True
    step.prepare(optimizer._trainable_variables)
    step.run(grads, variables, apply)


def apply_pairs(
    optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], apply: Callable[[Any], Any], skips: str | None
) -> Any:
    """The same in Keras 2; ``skips``: how the user said that gradients are summed already, None if nobody did."""
    pairs = list(grads_and_vars)
    step = None if WATCH.inside else distributed_step(optimizer)
    if step is None or not pairs:
        return apply(pairs)
    grads, variables = zip(*pairs, strict=True)
    if skips is not None:
        if not (any(map(is_marked, grads)) or any(map(WATCH.knows, variables))):
            warnings.warn(SKIPPED.format(name=keras_2.name_of(optimizer), flag=skips), stacklevel=3)
        with WATCH.reduced():
            return apply(pairs)
    with keras_2.init_scope():  # in a graph no variable can be made
        step.prepare(variables)
    step.run(grads, variables, lambda reduced, theirs: apply(list(zip(reduced, theirs, strict=True))))
    return optimizer.iterations
