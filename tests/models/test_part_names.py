"""The parameters that patterns choose."""

import pytest
from torch import nn

from rayfl.models.part_names import chosen
from tests.refusals import refused


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 2)


BODY = ("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias")
HEAD = ("head.weight", "head.bias")


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ((), ()),
        (("head",), HEAD),
        (("head.*",), HEAD),
        (("body.0.weight", "head.bias"), ("body.0.weight", "head.bias")),
        (("BatchNorm*",), BODY[2:]),
        (("*", "!head"), BODY),
        (("Linear", "!body"), HEAD),
    ],
)
def test_patterns_choose_parameters_modules_and_classes(patterns: tuple[str, ...], found: tuple[str, ...]):
    assert chosen(patterns, Net(), "net") == found


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("hed",), ["parts.personal", "'hed'", "did you mean 'head'"]),
        (("frozen.*",), ["parts.personal", "'frozen.*'"]),
        (("body.1.running_mean",), ["parts.personal", "'body.1.running_mean'"]),
        (("*",), ["parts.personal", "all of the 6", "local"]),
        (("head", "!head"), ["parts.personal", "none of the 6"]),
    ],
)
def test_patterns_that_choose_nothing_or_all_are_refused(patterns: tuple[str, ...], names: list[str]):
    with refused(names=names):
        chosen(patterns, Net(), "net")
