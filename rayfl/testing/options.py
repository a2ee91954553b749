"""The options of `pytest --pyargs rayfl.testing`, as a plugin, because pytest must know them before it finds tests.

It imports no other file of rayfl, because pytest loads it in every project where rayfl is installed.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """--method, --set, --experiment and --metric."""
    group = parser.getgroup("rayfl")
    group.addoption("--method", help="the method under contract, such as my_methods.py:FullLength")
    group.addoption("--metric", help="the metric under contract, such as my_metrics.py:Brier")
    group.addoption("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, as lr=0.1")
    group.addoption("--experiment", metavar="FILE", help="an experiment under contract: its task and all else in it")
