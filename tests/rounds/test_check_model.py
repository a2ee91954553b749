"""A method sees the model's parameters before round 0, and refuses settings that do not fit them."""

import pytest
from pydantic import Field

from rayfl.methods.base import RayflError, Tree
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalTraining
from rayfl.rounds.setup import Setup
from rayfl.wrappers.elastic import Elastic
from tests.contracts.seams.quadratic import Quadratic, setup
from tests.refusals import refused


class PersonalHeadHyper(LocalTraining):
    """Settings of FedAvg, and which part of the model stays at the client."""

    head: str = Field(default="bias", description="how the names of the head's parameters begin")


class PersonalHead(FedAvg):
    """FedAvg that names a part of the model."""

    hyper: PersonalHeadHyper

    def check_model(self, params: Tree) -> None:
        if not any(name.startswith(self.hyper.head) for name in params):
            raise RayflError(
                f"={self.hyper.head!r} begins no parameter; there are {', '.join(params)}", ("method", "head")
            )


def made(head: str, elastic: bool) -> Setup:
    method = PersonalHead(Quadratic(), PersonalHeadHyper(head=head))
    return setup(Elastic(method) if elastic else method)


@pytest.mark.parametrize("elastic", [False, True])
def test_a_head_that_the_model_does_not_have_is_refused_before_round_0(elastic: bool):
    with refused(names=["method.head='nothing.'", "weight, bias"]):
        made("nothing.", elastic)
    assert made("bias", elastic).rounds == 4
