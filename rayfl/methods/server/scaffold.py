"""SCAFFOLD: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020,
Algorithm 1.

Client i steps along g_i(y) - c_i + c, K times from x, so that it drifts with the mean gradient and not with its own.
Its control variate becomes c_i+ = g_i(x) (option I, on a batch of its own), or c_i - c + (x - y) / (K eta_l), the mean
of its K gradients (option II). Server: x <- x - eta_g mean_S delta_i and c <- c + (m / N) mean_S (c_i+ - c_i).

- c = mean_i c_i over all N clients after every round, whoever took part, because an absent client keeps its c_i. So
  control variates are averaged uniformly whatever `weighting` says: that weighs the deltas alone, and does not move
  the point that SCAFFOLD converges to, the minimiser of the plain mean of the f_i.
- Local steps are plain SGD: with momentum, Adam or clipping (x - y) / (K eta_l) is not a mean of gradients. Weight
  decay is a part of f_i.
- A lossy uplink without memory sends C(c_i+ - c_i), and c_i moves by just that, so that c = mean_i c_i still holds.
  With error feedback c_i becomes c_i+: the memory holds what the server does not have yet.
The sign of messages is ours: clients send c_i - c_i+.
"""

from typing import Literal, NotRequired

from rayfl.data.transfer import repeated
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Download,
    Field,
    Finished,
    FinishedStack,
    FirstDraws,
    Message,
    ModelServer,
    ModelState,
    Plan,
    Received,
    StackRows,
    Stage,
    Sum,
    Traits,
    Tree,
    UplinkMemory,
    WeightedMean,
    compressed,
    tree,
    unused_with,
)
from rayfl.methods.shared.local_training import (
    NOT_PLAIN,
    GradientMethod,
    LocalCarry,
    LocalTraining,
    Weighting,
    scaled_rows,
)

CONTROL = "control"
"""The stage of option I."""


class ScaffoldHyper(LocalTraining):
    """Hyper-parameters of SCAFFOLD."""

    weighting: Weighting = Field(default="uniform", description="weight of a client's delta in the average")
    server_lr: float = Field(default=1.0, gt=0, description="learning rate of the server, eta_g")
    option: Literal["I", "II"] = Field(
        default="II", description="new control variate: I, a gradient at x; II, the mean of the local gradients"
    )
    control_batch_size: int = Field(
        default=0,
        ge=0,
        description="examples of option I's gradient; 0: the whole split",
        json_schema_extra=unused_with(option=["II"]),
    )

    def unused(self) -> dict[str, str]:
        return {**super().unused(), **dict.fromkeys(NOT_PLAIN, "as SCAFFOLD corrects plain SGD steps")}


class ScaffoldState(UplinkMemory):
    """Client state."""

    control_variate: Tree  # c_i


class ScaffoldCarry(LocalCarry):
    """A client's carry."""

    correction: Tree  # c - c_i
    gradient: NotRequired[Tree]  # of option I, at x


class ScaffoldServer(ModelState):
    """Server state, beside x."""

    control_variate: Tree  # c


class Scaffold(GradientMethod, ModelServer):
    """Down: x and c. Up: delta and c_i - c_i+."""

    hyper: ScaffoldHyper
    paper = "Karimireddy et al., ICML 2020"
    capabilities = Capabilities(on_device=True, whole_stacks=True, keeps_parts=True)
    gather = {"delta": WeightedMean(), "control_variate": Sum()}

    def plan(self, round_number: int, coin: float) -> Plan:
        training = self.hyper.stage(round_number)
        if self.hyper.option == "II":
            return Plan(stages=(training,))
        return Plan(stages=(Stage(CONTROL, steps=1, batch_size=self.hyper.control_batch_size or None), training))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> ScaffoldState:
        return {"control_variate": tree.zeros_like(params)}

    def begin(self, state: ScaffoldState, received: Message, ctx: Context) -> ScaffoldCarry:
        correction = tree.sub(received["control_variate"].decode(), state["control_variate"])
        return self.corrected(self.start(received["model"].decode()), correction)

    def begin_stack(self, states: ScaffoldState, received: Message, ctx: Context, width: int) -> ScaffoldCarry:
        correction = tree.sub(repeated(received["control_variate"].decode(), width), states["control_variate"])
        return self.corrected(super().begin_stack(states, received, ctx, width), correction)

    def corrected(self, carry: LocalCarry, correction: Tree) -> ScaffoldCarry:
        """The carry with c - c_i, and room for option I's gradient."""
        begun: ScaffoldCarry = {**carry, "correction": correction}
        return begun if self.hyper.option == "II" else {**begun, "gradient": tree.zeros_like(correction)}

    def step(self, carry: ScaffoldCarry, batch: Batch, *, stage: Stage) -> ScaffoldCarry:
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        if stage.name == CONTROL:
            return {**carry, "gradient": self.optimizer.penalised(gradient, carry["params"])}
        return self.descend(carry, loss, tree.add(gradient, carry["correction"]), stage)

    def finish(self, state: ScaffoldState, carry: ScaffoldCarry, ctx: Context) -> Finished:
        old, delta = state["control_variate"], self.progress(carry)
        new = self.new_control_variate(carry, delta, ctx)
        message, state = compressed(state, {"delta": delta, "control_variate": tree.sub(old, new)}, ctx)
        if message and "control_variate" not in state.get("uplink", {}):
            new = tree.sub(old, message["control_variate"].decode_beside(old))
        return self.finished({**state, "control_variate": new}, message, carry, ctx, "train")

    def new_control_variate(self, carry: ScaffoldCarry, delta: Tree, ctx: Context) -> Tree:
        """c_i+ by the option."""
        if "gradient" in carry:
            return carry["gradient"]
        lr = ctx.plan.stages[-1].lr
        return tree.sub(tree.scale(delta, 1 / (ctx.work["train"].num_steps * lr)), carry["correction"])

    def finish_stack(self, states: ScaffoldState, carry: ScaffoldCarry, rows: StackRows, ctx: Context) -> FinishedStack:
        old, new, delta = states["control_variate"], carry.get("gradient"), self.progress(carry)
        if new is None:
            factors = [1 / (work["train"].num_steps * ctx.plan.stages[-1].lr) for work in rows.work]
            new = tree.sub(scaled_rows(delta, factors), carry["correction"])
        change = tree.sub(old, new)
        # As what a dense uplink sends: see `finish`.
        state: ScaffoldState = {"control_variate": tree.sub(old, change)}
        return self.finished_stack(state, {"delta": delta, "control_variate": change}, carry, rows, "train")

    def init_server(self, params: Tree) -> ScaffoldServer:
        return {"params": params, "control_variate": tree.zeros_like(params)}

    def download(self, server: ScaffoldServer, ctx: Context) -> Download:
        return {"model": server["params"], "control_variate": server["control_variate"]}

    def update(self, server: ScaffoldServer, received: Received, ctx: Context) -> ScaffoldServer:
        delta, change = received["delta"].result, received["control_variate"].sum
        return {
            "params": tree.add(server["params"], delta, -self.hyper.server_lr),
            "control_variate": tree.add(server["control_variate"], change, -1 / ctx.num_clients),
        }
