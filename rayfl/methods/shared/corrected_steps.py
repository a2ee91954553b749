"""Local steps along a corrected gradient, g_i + c_i, which methods of gradient tracking take between two exchanges."""

from rayfl.methods.base import (
    Capabilities,
    Context,
    FirstDraws,
    Message,
    ModelState,
    PeerHalf,
    State,
    Traits,
    Tree,
    tree,
)
from rayfl.methods.shared.local_training import NOT_PLAIN, GradientMethod, LocalCarry, LocalWork


class CorrectedWork(LocalWork):
    """Hyper-parameters of local training by plain steps along corrected gradients."""

    def unused(self) -> dict[str, str]:
        return {**super().unused(), **dict.fromkeys(NOT_PLAIN, "as corrected steps are those of plain SGD")}


class CorrectedState(ModelState):
    """A peer's state."""

    correction: Tree  # c_i


class CorrectedCarry(LocalCarry):
    """A peer's carry."""

    correction: Tree


class CorrectedSteps(GradientMethod, PeerHalf):
    """A peer that steps along g_i + c_i. Subclasses say how c_i, at first 0, moves; its sum over the peers stays 0."""

    hyper: CorrectedWork
    capabilities = Capabilities(personalized=True, own_compression=True)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> CorrectedState:
        return {"params": params, "correction": tree.zeros_like(params)}

    def begin(self, state: State, received: Message, ctx: Context) -> CorrectedCarry:
        return {**super().begin(state, received, ctx), "correction": state["correction"]}

    def direction(self, carry: CorrectedCarry, gradient: Tree) -> Tree:
        return tree.add(gradient, carry["correction"])
