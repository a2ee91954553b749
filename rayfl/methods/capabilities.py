"""What a method can do and what it needs, as one object that classes declare, subclasses inherit, wrappers combine.

    class FedAvg(GradientMethod, ModelServer):
        capabilities = Capabilities(on_device=True, keeps_parts=True, takes_stale=True)

A class names only what it changes. For every other field it has the value of its bases, which are searched in Python's
order; the promises (`Rule.PROMISE`) are the exception. If a value depends on the settings, the constructor sets it:
`self.capabilities = self.capabilities.but(needs_everyone=True)`.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Self

from rayfl.errors import RayflError
from rayfl.methods.hook_types import Newcomer
from rayfl.settings import Settings, shown
from rayfl.topology.mixing import Needs

OF_SERVERS = (
    "downlink",
    "selection",
    *(f"clients.{name}" for name in ("per_round", "fraction", "deadline_s", "take_first", "upload_loss")),
    "clients.dropout_after_download",
)
"""Settings that do nothing without a server."""
OF_EXCHANGES = ("topology", "uplink", "downlink", "clients.uplink_mbps", "clients.downlink_mbps")
"""Settings that do nothing if clients exchange nothing."""


class Rule(Enum):
    """How a field is inherited, and how a wrapper combines it with the wrapped method's; each field has exactly one."""

    INNER = "inherited; a wrapper has the wrapped method's"
    EITHER = "inherited; true of a wrapper if it is true of its class or of the wrapped method"
    PROMISE = "about the class's own hooks: not inherited; true of a wrapper if its class and the wrapped method say so"

    # Any: a field's values.
    def combined(self, inner: Any, outer: Any) -> Any:
        """A wrapper's value, from the wrapped method's and that of the wrapper's class."""
        if self is Rule.INNER:
            return inner
        return (inner or outer) if self is Rule.EITHER else (inner and outer)


class Capabilities(Settings):
    """The capabilities of a method.

    They are validated as settings are, so that a misspelt one is refused in one sentence, and they know which of them
    were given (`model_fields_set`), so that a class can set an inherited one back to its default.
    """

    personalized: Annotated[bool, Rule.INNER] = False
    """Whether a client's model differs from the server's: evaluation then needs every client's state."""
    depends_on_num_rounds: Annotated[bool, Rule.INNER] = False
    """Whether a round depends on `Context.num_rounds`: a run that has begun then cannot be extended."""
    uses_graph: Annotated[bool, Rule.INNER] = False
    """Whether a method with a server uses the experiment's topology, as a graph over its clients."""
    needs_features: Annotated[bool, Rule.INNER] = False
    """Whether steps call `BoundTask.loss_and_features`: the task must be a classifier with a linear head that is
    trained, with its bias, and with layers before it."""
    label_counts: Annotated[bool, Rule.INNER] = False
    """Whether the server needs how many train examples of each class a client has (`Traits.label_counts`). A client
    tells it once, when the server first reaches it: 32 bits a class, before its download. The task must be
    classification."""
    honours_retention: Annotated[bool, Rule.INNER] = False
    """Whether a client's retention ratio (`clients.retention_ratio`) changes what it keeps or sends."""
    own_retention: Annotated[tuple[str, ...], Rule.INNER] = ()
    """Settings of `Hyper` that cannot be given beside `clients.retention_ratio`: they set one ratio for all clients."""
    newcomer: Annotated[Newcomer | None, Rule.INNER] = None
    """What the method does for a client that comes for the first time; `clients.unseen` evaluates the result.

    "model": the client takes the global model (or the mean, with `evaluated_from_mean`) and does `eval_stages`.
    "round": it downloads, does the local work of a round and sends nothing; its state is then evaluated as others are.
    "undefined": `clients.unseen` is refused. Left out: "round" if `personalized`, else "model"; "undefined" among
    peers.
    """
    has_global_model: Annotated[bool, Rule.INNER] = True
    """Whether the server's model is one that all clients have. False if each of them trains parts of its own."""
    delta_of_network: Annotated[bool, Rule.INNER] = True
    """Whether the message `delta`, if there is one, is of all parameters of the network and of no others, and the
    server adds it to its model. False of methods with modules beside the network, or that send its body alone."""
    evaluated_after_training: Annotated[bool, Rule.INNER] = True
    """Whether a client is also evaluated right after its local work. False if that work does not change its model."""
    needs_everyone: Annotated[bool, Rule.INNER] = False
    """Whether every client must be in every round, and every message must arrive. Settings that may keep a client or a
    message away are then refused."""
    needs_one_omega: Annotated[bool, Rule.INNER] = False
    """Whether all clients must have an uplink of the same omega. Uplinks with a ratio of each client's own are then
    refused; with `own_feedback` only unbiased ones are."""
    metrics_with_variance: Annotated[tuple[str, ...], Rule.INNER] = ()
    """Metrics of clients whose variance over a round's clients is also recorded, as <name>_variance."""
    on_device: Annotated[bool, Rule.PROMISE] = False
    """Whether `begin`, `end_stage`, `finish` and `eval_begin` take tensors of the GPU that clients are trained on.

    If False, these hooks are given tensors of main memory, and only `step` works on the GPU. A hook that takes tensors
    of a GPU makes no tensors of more than one number in main memory, decodes what it has sent by
    `packet.decode_beside(tree)`, and calls no numpy.
    """
    whole_stacks: Annotated[bool, Rule.PROMISE] = False
    """Whether `begin_stack` and `finish_stack` do for a stack of clients what `begin` and `finish` do for each.

    The engine then calls them instead where nothing but clients' tensors differs between clients: with a server, a
    dense uplink, and none of the hooks that look at one client (`personal_message`, `stages`, `end_stage`, masks)."""
    server_on_device: Annotated[bool, Rule.PROMISE] = False
    """Whether `download`, `model` and the server's update take tensors of a GPU (`runtime.server_on_device`), and the
    update gives there the bits of main memory: it only adds, subtracts and multiplies, one operation after another.

    `tree.add` with a scale rounds once where two operations round twice, and not on every device; so do `addcmul`,
    `lerp` and the like.
    """
    keeps_parts: Annotated[bool, Rule.PROMISE] = False
    """Whether clients train one model, `carry["params"]`, by at most one gradient per step, so that they can keep parts
    of it for themselves (`[parts]`)."""
    takes_stale: Annotated[bool, Rule.PROMISE] = False
    """Whether messages need not be of one round, as under schedules that are not in rounds.

    With a server: whether it can update with messages that began from different versions of its state and are each
    multiplied by a factor. Among peers: whether a peer can mix the newest messages of its neighbours, however old."""
    may_be_silent: Annotated[bool, Rule.INNER] = False
    """Whether a client that has trained may send nothing in some rounds, or nothing under some names of `gather`.
    Wrappers that must see what every client sends, differential privacy among them, refuse such a method."""
    own_compression: Annotated[bool, Rule.INNER] = False
    """Whether the method fixes how its messages are encoded, so that `uplink` and `downlink` may not be set."""
    own_feedback: Annotated[tuple[str, ...], Rule.INNER] = ()
    """Of "uplink" and "downlink", those whose error the method sends later by itself: `feedback` is refused there."""
    hands_over_trees: Annotated[bool, Rule.INNER] = True
    """Whether `finish` returns every message named in `gather` as trees, or passes its trees to `Context.outgoing`."""
    sees_all: Annotated[bool, Rule.EITHER] = False
    """Whether a wrapper must see all that clients send, so that none around it may add messages."""
    include_self: Annotated[bool, Rule.INNER] = True
    """Whether a peer gathers its own message too."""
    in_pairs: Annotated[bool, Rule.INNER] = False
    """Whether a peer exchanges with one neighbour at a time, each of whom may be in the middle of its training: it has
    `PeerHalf.message_to_partner`, and needs a schedule with `partners = 1`."""
    weighs_links: Annotated[bool, Rule.INNER] = False
    """Whether peers' messages are weighed by `graphs.link_weights` instead of by mixing weights."""
    needs_weights: Annotated[Needs, Rule.INNER] = "row"
    """What peers need of mixing weights: "row" sums of 1, "column" sums of 1 and no negative weight, a "symmetric"
    matrix with sums of 1, or sums of 1 in both directions, "doubly". With `needs_everyone` and other needs than "row"
    the matrix must be the same in all rounds."""
    needs_tree: Annotated[bool, Rule.INNER] = False
    """Whether the peers' graph must be a tree that does not change."""
    num_exchanges: Annotated[int, Rule.INNER] = 1
    """The number of exchanges of a peers' round, with the same graph and messages of the same size: all are billed, and
    `PeerHalf.mixing` gives the product of their matrices. Above 1, uplinks with loss are refused."""
    evaluated_from_mean: Annotated[bool, Rule.INNER] = False
    """Whether `eval_begin` gets the mean of all peers' models, which no peer knows in reality."""

    @classmethod
    def of(cls, kind: type, is_peer: bool) -> Self:
        """The capabilities of the method `kind`: what it says itself, then what its bases say. `is_peer`: it has no
        server."""
        said: dict[str, Any] = {}
        declared = nothing = cls()
        for base in reversed(kind.__mro__):
            declared = vars(base).get("capabilities", nothing)
            if not isinstance(declared, Capabilities):
                raise RayflError(f"{base.__name__}.capabilities is {shown(declared)}; it must be Capabilities(...)")
            taken = {name for name in declared.model_fields_set if base is kind or RULES[name] is not Rule.PROMISE}
            said |= {name: getattr(declared, name) for name in taken}
        if said.get("newcomer") is None:
            said["newcomer"] = "undefined" if is_peer else "round" if said.get("personalized") else "model"
        # Subclasses, too, read from `model_fields_set` what this class says itself.
        return cls.model_construct(declared.model_fields_set, **said)

    # Any: values of fields.
    def but(self, **changes: Any) -> Self:
        """The same capabilities, except for these."""
        return type(self)(**{**dict(self), **changes})

    def around(self, inner: "Capabilities") -> Self:
        """The capabilities of a wrapper whose class has these, around a method with those of `inner`."""
        values = {name: rule.combined(getattr(inner, name), getattr(self, name)) for name, rule in RULES.items()}
        return self.but(**values)


def rules(kind: type[Capabilities]) -> Mapping[str, Rule]:
    """The rule of each field. Raise TypeError for a field without one, or with several."""
    by_field = {}
    for name, field in kind.model_fields.items():
        of_field = [rule for rule in field.metadata if isinstance(rule, Rule)]
        if len(of_field) != 1:
            raise TypeError(f"{kind.__name__}.{name} has {len(of_field)} rules; write Annotated[..., Rule.INNER]")
        by_field[name] = of_field[0]
    return by_field


RULES = rules(Capabilities)
