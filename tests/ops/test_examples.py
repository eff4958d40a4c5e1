"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

from treewy import ops


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(ops.__path__)])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"treewy.ops.{name}"))
    assert result.failed == 0


def test_every_operator_has_an_example() -> None:
    for name in ops.__all__:
        assert name == "PADDING" or ">>>" in getattr(ops, name).__doc__
