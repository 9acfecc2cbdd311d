"""What is public, and what its docstrings must say: the rule of ``test_docstrings.py``, and the names for its examples.

``python -m tests.docstrings MODULE`` prints what is public in an adapter, so that who tests need not import it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

ADAPTERS = ("hvdkit.torch", "hvdkit.tensorflow", "hvdkit.keras")
# Arguments that are tensors, arrays or variables, whatever their annotation says.
ARRAYS = {"tensor", "tensors", "value", "values", "variables", "params", "input", "payload", "source", "sources", "var"}
REFERENCE = re.compile(r"those\s+of\s+(?:hvd\.)?([\w.]*\w)")
SAME_EXAMPLE = re.compile(r"example\s+is\s+that\s+of\s+(?:hvd\.)?([\w.]*\w)")


@dataclass(frozen=True)
class Public:
    """A public function, class or method, as far as its docstring is judged."""

    name: str
    doc: str
    parameters: tuple[str, ...] = ()
    returns: bool = False
    arrays: bool = False  # whether tensors, arrays or variables go in or come out
    error: bool = False

    def problems(self, others: Mapping[str, Public]) -> list[str]:
        """What the docstring lacks. It may refer to one of ``others``: "Arguments and errors are those of NAME"."""
        if not self.doc.strip():
            return [f"{self.name}: has no docstring"]
        if self.error:
            said = re.search(r"\b[Rr]aised\b", self.doc) and "What to do" in self.doc
            return [] if said else [f"{self.name}: does not say when it is raised ('Raised') and 'What to do'"]
        said = "\n".join([self.doc, *(one.doc for one in _referred(self, others))])
        found = []
        if not self.parameters:
            if self.returns and len(self.doc.split()) < 4:
                found.append("does not say what it returns")
        else:
            found += [f"does not name the argument {one}" for one in self.parameters if not _names(said, one)]
            wanted = {
                "errors ('Raises')": re.search(r"\b[Rr]aises?\b", said),
                "the shape of its arrays": not self.arrays or "shape" in said,
                "an example ('>>>')": ">>>" in self.doc or self._has_example_in(others),
                "what it returns ('Returns')": not self.returns or re.search(r"\bReturns\b", self.doc),
            }
            found += [f"lacks {what}" for what, there in wanted.items() if not there]
        return [f"{self.name}: {one}" for one in found]

    def _has_example_in(self, others: Mapping[str, Public]) -> bool:
        """Whether the docstring says whose example is its own, too: that of the class that both are about."""
        said = SAME_EXAMPLE.search(self.doc)
        return said is not None and said[1] in others and ">>>" in others[said[1]].doc


def _names(text: str, parameter: str) -> bool:
    """Whether a parameter is named as one: in backquotes, or at the beginning of a line of a section of arguments."""
    one = re.escape(parameter)
    return bool(re.search(rf"``{one}``|^ +{one}: ", text, re.MULTILINE))


def _referred(public: Public, others: Mapping[str, Public]) -> list[Public]:
    """What a docstring refers to, and what that does. A name of another adapter has its module in front."""
    found, open_ = {public.name: public}, [public]
    while open_:
        for name in REFERENCE.findall(open_.pop().doc):
            if name in others and name not in found:
                found[name] = others[name]
                open_.append(others[name])
    return [one for one in found.values() if one is not public]


def objects(module: Any) -> Iterator[tuple[str, Any]]:
    """The public functions and classes of an adapter with their names, in a fixed order, each followed by methods."""
    for name in [name for name in module.__all__ if name not in ("Compression", "callbacks")]:
        yield from _with_methods(name, getattr(module, name))
    yield "Compression", module.Compression
    for name in sorted({name for kind in module.Compression.__mro__ for name in vars(kind) if name[0] != "_"}):
        yield f"Compression.{name}", getattr(module.Compression, name)
    if module.__name__ == "hvdkit.torch":
        import hvdkit
        from hvdkit import errors
        from hvdkit.torch.optimizers.distributed_class import distributed_class

        yield "install_as_horovod", hvdkit.install_as_horovod
        for name, one in vars(errors).items():
            if isinstance(one, type) and issubclass(one, Exception):
                yield f"errors.{name}", one
        made = distributed_class(importlib.import_module("torch").optim.SGD)
        for name in ("synchronize", "skip_synchronize", "zero_grad", "set_backward_passes_per_step"):
            yield f"DistributedOptimizer.{name}", vars(made)[name]
        yield "DistributedOptimizer.reset_compression", made.reset_compression
    elif module.__name__ == "hvdkit.tensorflow":
        from hvdkit.tensorflow.gradient_tape import _tape_class

        made = _tape_class(importlib.import_module("tensorflow").GradientTape)
        for name in (
            "gradient",
            "jacobian",
            "batch_jacobian",
            "register_local_source",
            "get_local_and_global_gradients",
        ):
            yield f"DistributedGradientTape.{name}", vars(made)[name]
    else:
        from hvdkit.keras.optimizer_class import DistributedMixin

        yield "DistributedOptimizer.register_local_var", DistributedMixin.register_local_var
        for name in [name for name in sorted(vars(module.callbacks)) if name.endswith("Callback")]:
            yield f"callbacks.{name}", getattr(module.callbacks, name)
        local = module.callbacks.BroadcastGlobalVariablesCallback.register_local_var
        yield "callbacks.BroadcastGlobalVariablesCallback.register_local_var", local


def _with_methods(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    if not callable(one):  # Average, global_process_set
        return
    yield name, one
    if isinstance(one, type) and not issubclass(one, Exception):
        inherited = set(dir(one.__mro__[1]))  # which a class above explains
        for method, value in vars(one).items():
            if method[0] != "_" and method not in inherited and inspect.isroutine(value):
                yield f"{name}.{method}", getattr(one, method)


def catalogue(module: Any) -> list[Public]:
    """What is public in an adapter, for the rule."""
    return [_public(name, one) for name, one in objects(module)]


def _public(name: str, one: Any) -> Public:
    doc = inspect.cleandoc(one.__doc__ or "")
    if isinstance(one, type) and issubclass(one, Exception):
        return Public(name, doc, error=True)
    given = inspect.signature(one)
    made_by_us = name.split(".")[-1] == "DDPHook"
    # What casts are called with is Horovod's affair: they are taken as they are, as is Compression.
    taken_as_it_is = name.split(".")[-1] in ("Compression", "none", "fp16", "bf16")
    named = [one for one in given.parameters if one not in ("self", "cls", "args", "kwargs")]
    parameters = [] if made_by_us or taken_as_it_is else named
    kinds = [str(parameter.annotation) for parameter in given.parameters.values()] + [str(given.return_annotation)]
    arrays = not ARRAYS.isdisjoint(parameters) or any(re.search(r"\b(Tensor|Array|Bytes)\b", kind) for kind in kinds)
    returns = not isinstance(one, type) and str(given.return_annotation) not in ("None", str(None))
    return Public(name, doc, tuple(parameters), returns, arrays)


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in catalogue(importlib.import_module(sys.argv[1]))]))
