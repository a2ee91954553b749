"""Capabilities: what a class says, what it inherits, and what a wrapper has."""

from pathlib import Path
from typing import Annotated, Any

import pytest

from rayfl.choices.kinds import find
from rayfl.methods.base import Capabilities, Method
from rayfl.methods.capabilities import RULES, Rule, rules
from rayfl.methods.peers.dpsgd import DPSGD
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.server.moon import MOON
from rayfl.methods.shared.local_training import GradientMethod, OwnModel
from rayfl.methods.shared.wrapper import Wrapping
from tests.contracts.seams.quadratic import Quadratic
from tests.refusals import refused

UNUSUAL: dict[str, Any] = {
    name: ("uplink",) if field.default == () else not field.default for name, field in Capabilities.model_fields.items()
} | {"newcomer": "undefined", "needs_weights": "column", "num_exchanges": 2}
"""A value of each capability that is not its default."""


def test_every_capability_has_one_rule():
    assert RULES.keys() == Capabilities.model_fields.keys()


@pytest.mark.parametrize("kind", [bool, Annotated[bool, Rule.INNER, Rule.PROMISE]])
def test_a_capability_without_one_rule_is_an_error(kind: Any):
    More = type("More", (Capabilities,), {"__annotations__": {"flies": kind}, "flies": False})
    with pytest.raises(TypeError, match="flies"):
        rules(More)


@pytest.mark.parametrize("name", RULES)
def test_all_but_promises_are_inherited(name: str):
    kind = type("Mine", (FedAvg,), {"capabilities": Capabilities(**{name: UNUSUAL[name]})})
    heir = type("Heir", (kind,), {})
    assert getattr(kind.capabilities, name) == UNUSUAL[name]
    assert getattr(heir.capabilities, name) == (False if RULES[name] is Rule.PROMISE else UNUSUAL[name])


def test_bases_are_searched_in_pythons_order():
    class Base(GradientMethod):
        capabilities = Capabilities(personalized=True, needs_everyone=True)

    class Left(Base):
        capabilities = Capabilities(may_be_silent=True)

    class Right(Base):
        capabilities = Capabilities(personalized=False)

    class Mixed(Left, Right):
        """Python finds the attributes of Right before those of Base."""

    can = Mixed.capabilities
    assert (can.personalized, can.needs_everyone, can.may_be_silent) == (False, True, True)
    assert MOON.capabilities.personalized is False and OwnModel.capabilities.personalized is True


def test_a_new_client_does_what_follows_from_the_rest():
    class Personal(FedAvg):
        capabilities = Capabilities(personalized=True)

    class Global(DPSGD):
        capabilities = Capabilities(newcomer="model")

    found = [kind.capabilities.newcomer for kind in (FedAvg, Personal, DPSGD, Global)]
    assert found == ["model", "round", "undefined", "model"]


@pytest.mark.parametrize("name", RULES)
def test_a_wrapper_combines_by_the_rule(name: str):
    usual, unusual = Capabilities(), Capabilities(**{name: UNUSUAL[name]})
    found = {
        (own, inner): getattr(mine.around(other), name) == UNUSUAL[name]
        for own, mine in ((False, usual), (True, unusual))
        for inner, other in ((False, usual), (True, unusual))
    }
    expected = {
        Rule.INNER: lambda own, inner: inner,
        Rule.EITHER: lambda *both: any(both),
        Rule.PROMISE: lambda *b: all(b),
    }
    assert found == {both: expected[RULES[name]](*both) for both in found}


def test_a_wrapper_has_what_the_settings_of_the_method_change():
    inner = FedAvg(Quadratic())
    inner.capabilities = inner.capabilities.but(needs_everyone=True)
    assert Wrapping(inner).capabilities.needs_everyone
    assert not FedAvg.capabilities.needs_everyone


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("class Mine(FedAvg, on_device=True):", "    paper = 'none'"),
        ("class Mine(FedAvg):", "    on_device = True"),
        ("class Half:\n    on_device = True\n\nclass Mine(Half, FedAvg):", "    paper = 'none'"),
    ],
    ids=["class line", "attribute", "mixin"],
)
def test_a_capability_elsewhere_is_refused_with_the_new_line(head: str, body: str, tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(f"from rayfl.methods.server.fedavg import FedAvg\n\n{head}\n{body}\n")
    with refused(names=["mine.py", "Mine", "on_device", "capabilities = Capabilities(on_device=...)"]):
        find(Method, f"{file}:Mine")


@pytest.mark.parametrize(
    ("given", "names"),
    [("Capabilities(on_devcie=True)", ["on_devcie", "on_device"]), ("{'on_device': True}", ["Capabilities(...)"])],
)
def test_other_capabilities_are_refused(given: str, names: list[str], tmp_path: Path):
    file = tmp_path / "mine.py"
    start = "from rayfl.methods.base import Capabilities\nfrom rayfl.methods.server.fedavg import FedAvg\n\n"
    file.write_text(f"{start}class Mine(FedAvg):\n    capabilities = {given}\n")
    with refused(names=["mine.py", *names]):
        find(Method, f"{file}:Mine")
