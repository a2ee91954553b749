"""A message wrapper of your own: clients send a momentum of their messages (Karimireddy, He, Jaggi, ICML 2021).

rayfl run jobs/experiments/demo.toml 'wrap=["jobs/examples/my_wrappers.py:WorkerMomentum"]'
"""

from collections.abc import Mapping

from rayfl import tree
from rayfl.methods.base import Context, Metrics, State, Tree
from rayfl.wrappers.base import MessageWrapper


class WorkerMomentum(MessageWrapper):
    """Sends m <- beta m + (1 - beta) message, from m = 0. Fits methods that send one tree."""

    beta: float = 0.9
    """The weight of earlier messages."""

    def init_client(self, params: Tree) -> State:
        return {"momentum": tree.zeros_like(params)}

    def client(
        self, trees: Mapping[str, Tree], state: State, received: Tree, ctx: Context
    ) -> tuple[Mapping[str, Tree], State, Metrics]:
        ((name, sent),) = trees.items()
        momentum = tree.add(tree.scale(state["momentum"], self.beta), sent, 1 - self.beta)
        return {name: momentum}, {"momentum": momentum}, {}
