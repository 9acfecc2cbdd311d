"""What a distributed optimizer does in place of its own update: reduce the gradients, then update."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from hvdkit.api.gradients.guard import WATCH, is_marked, mark
from hvdkit.keras import keras_2
from hvdkit.keras.backend import backend
from hvdkit.keras.step import distributed_step, step_of

SKIPPED = (
    "The optimizer '{name}' was told that its gradients are summed already ({flag}), and nothing in this process has "
    "summed them: ranks may train different models.\n"
    "HINT: leave the argument out, or call optimizer.aggregate_gradients() before."
)


def reducing_first(of_class: Any) -> Any:
    """``apply`` in place of ``of_class`` of an optimizer of Keras 3 that is distributed, or may have one inside.

    Ranks must agree on whether gradients are finite: they are reduced before a loss scale looks at them.
    """

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce the gradients over all ranks, and update the variables. Collective."""
        step = None if WATCH.inside else distributed_step(self)  # if it is, one around this one has reduced them
        if step is None:
            of_class(self, grads, trainable_variables)
            return
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        grads = list(grads)
        if len(grads) != len(variables):
            of_class(self, grads, trainable_variables)  # which says what is wrong
            return
        if not self.built and grads:
            # Outside of branches of a graph, where no variable can be made.
            self.build(variables)
            self.built = True
        step.prepare(self._trainable_variables)
        step.run(grads, variables, functools.partial(of_class, self), self)

    apply.reduces_first = True  # type: ignore[attr-defined]
    return apply


def reducing_pairs_first(of_class: Any) -> Any:
    """The same of ``apply_gradients`` of Keras 2, be it an optimizer since 2.11 or an older one."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        """Reduce the gradients over all ranks, and update the variables. Collective."""
        pairs = list(grads_and_vars)
        step = None if WATCH.inside else distributed_step(self)
        if step is None or not pairs:
            return of_class(self, pairs, *args, **options)
        grads, variables = zip(*pairs, strict=True)
        skips = keras_2.skips(options)
        if skips is not None:
            if not any(map(is_marked, [*grads, *variables])):
                warnings.warn(SKIPPED.format(name=keras_2.name_of(self), flag=skips), stacklevel=2)
            with backend().after(grads), WATCH.reduced():
                return of_class(self, pairs, *args, **options)
        with keras_2.init_scope():  # in a graph no variable can be made
            step.prepare(variables)

        def update(reduced: list[Any], theirs: list[Any]) -> None:
            of_class(self, list(zip(reduced, theirs, strict=True)), *args, **options)

        step.run(grads, variables, update)
        return self.iterations

    return apply_gradients


def aggregate_gradients(optimizer: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Reduce the gradients over all ranks, for apply_gradients(..., skip_gradients_aggregation=True)."""
    pairs = list(grads_and_vars)
    if WATCH.inside or not pairs:
        return pairs
    grads, variables = zip(*pairs, strict=True)
    reduced = step_of(optimizer).reduce(grads, variables)
    mark(variables)
    return list(zip(reduced, variables, strict=True))
