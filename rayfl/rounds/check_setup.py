"""Checks before a run that the method and the rest of the experiment go together."""

from rayfl import tree
from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.data.partition import Partition
from rayfl.determinism.seeding import generator
from rayfl.errors import RayflError, refuse_if
from rayfl.methods.base import Method, Stage
from rayfl.population.sampling import DROPOUTS, Clients
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.check_schedule import check_schedule
from rayfl.rounds.early_stop import EarlyStop, StopRule, stop_rule
from rayfl.rounds.peer_exchange import graph_among, mixing_weights
from rayfl.rounds.setup import Setup
from rayfl.task import NetworkTask
from rayfl.tasks.supervised import Classification
from rayfl.topology.graphs import Topology, connected
from rayfl.topology.mixing import is_symmetric


def check_setup(setup: Setup) -> None:
    """Raise RayflError if the method and the rest of the experiment do not go together."""
    method, clients = setup.method, setup.population.settings
    name = method.title
    check_splits(method, setup.partition)
    check_retention(method, setup.uplink, clients)
    check_feedback(setup)
    is_classifier = isinstance(method.task, NetworkTask) and isinstance(method.task.task, Classification)
    classifier = method.task if isinstance(method.task, NetworkTask) and is_classifier else None
    if method.capabilities.label_counts and (setup.is_peer or classifier is None):
        cause = "it has no server" if setup.is_peer else "there are classes only with task 'classification'; take it"
        raise RayflError(f"{name} needs clients to tell the server their label counts, and {cause}, or another method")
    if method.capabilities.needs_features and not (
        classifier is not None
        # A method may have parameters beside the network.
        and {f"{classifier.head}.weight", f"{classifier.head}.bias"}
        < setup.initial.keys() & {slot[-1] for slot in classifier.network.slots}
    ):
        raise RayflError(
            f"{name} uses representations, the input of a classifier's last linear layer; take task "
            "'classification' and a model that ends with such a layer, trained with its bias and with layers before "
            "it, for example 'mlp'"
        )
    # First states may only exist for models that fit.
    checked_hook(method.check_model)(setup.initial)
    check_masks(setup, name)
    half = None if setup.is_peer else setup.server_half
    has_own_messages = half and (half.overrides("reply") or half.overrides("personal_message"))
    refuse_if(
        [
            (
                setup.selection.name != "uniform" and clients.num_selected >= setup.num_clients,
                "selection",
                f"={setup.selection.name!r} chooses among clients, and all of them are asked; lower clients.per_round",
            ),
            (
                has_own_messages and setup.downlink.init(setup.initial),
                "downlink",
                f"={setup.downlink.name!r} keeps one memory for all clients, and {name} sends each a message of its "
                "own; give a compressor without a memory",
            ),
        ]
    )
    check_schedule(setup, name)
    check_server(setup, name)
    fewer = ("per_round", "fraction") if clients.num_selected < setup.num_clients else ()
    ways = (*DROPOUTS, "availability", "deadline_s", "take_first", "work", *fewer)
    if half and method.capabilities.needs_everyone and (away := [key for key in ways if clients.is_given(key)]):
        # A class that does not say so needs everyone by its settings.
        how = "" if type(method.innermost).capabilities.needs_everyone else " with method.weighting='samples'"
        raise RayflError(
            f" keeps clients, or steps of theirs, out of rounds, and {name}{how} needs every client in every round; "
            "remove it" + (", or set weighting='uniform'" if how else ""),
            ("clients", away[0]),
        )
    check_lossless(setup, name)
    check_evaluation(setup)
    if setup.unseen:
        check_unseen(setup, name)
    check_topology(setup, name)
    setup.method.check(setup.num_clients, setup.topology, setup.seed)
    method.check_ratios(setup.population.retention_groups or [1.0], setup.context(0, setup.plan(0), 0, "check"))


def check_server(setup: Setup, name: str) -> None:
    """Reject `runtime.server_on_device` where the server cannot stay on the device with the bits of main memory."""
    reasons = {
        f"{name}'s server computes in main memory": not setup.method.capabilities.server_on_device,
        f"uplink {setup.uplink.name!r} encodes in main memory": not setup.hooks_on_device,
        "a compressed downlink is encoded in main memory": setup.downlink != Dense(),
        f"schedule {setup.schedule.name!r} keeps versions of the server's state": setup.schedule.collects == "flights",
    }
    words = "=true keeps the server on the GPU, and"
    refuse_if(
        (setup.server_on_device and holds, "runtime.server_on_device", f"{words} {reason}; leave it out")
        for reason, holds in reasons.items()
    )


def check_masks(setup: Setup, name: str) -> None:
    """Reject settings about masks for methods without them."""
    first = setup.first_state(0)
    mask = setup.method.trains_under(first, Stage(), setup.context(0, setup.plan(0), 0, "check"))
    # Operations are counted whatever the settings are: a warning comes before the run, and no step counts under vmap.
    is_counted = setup.forward_flops > 0
    refuse_if(
        [
            (
                setup.evaluation.masks and setup.method.mask(first) is None,
                "evaluation.masks",
                f"=true compares masks, but clients of {name} keep none; remove it",
            ),
            (
                setup.population.settings.sparse_speedup and (not is_counted or mask is None),
                "clients.sparse_speedup",
                f"=true makes training under a mask faster, but clients of {name} have no mask, or the model has no "
                "convolution or linear layer; remove it",
            ),
        ]
    )


def check_lossless(setup: Setup, name: str) -> None:
    """Reject an uplink with loss where every message must arrive as it is."""
    count = setup.method.capabilities.num_exchanges
    loses = setup.uplink.omega(tree.num_entries(setup.initial)) != 0
    refuse_if(
        [
            (
                loses and count > 1,
                "uplink",
                f"={setup.uplink.name!r} loses something in every exchange, and {name} has {count} per round; remove "
                "it, or take one exchange per round",
            ),
            (
                loses and setup.is_peer and setup.peer_half.has_link_messages,
                "uplink",
                f"={setup.uplink.name!r} loses something, and {name} sends each neighbour a message of its own, which "
                "must arrive as it is; remove it",
            ),
        ]
    )


def check_topology(setup: Setup, name: str) -> None:
    """Reject a graph that is missing, or does not fit the method."""
    if setup.topology is None:
        if setup.is_peer and setup.method.gather:
            raise RayflError(f"peers of {name} exchange messages along a graph; add a [topology] table")
        if setup.method.capabilities.uses_graph:
            raise RayflError(f"{name} has a graph over its clients; add a [topology] table")
    else:
        check_graph(setup, setup.topology, name)


def check_graph(setup: Setup, topology: Topology, name: str) -> None:
    """Reject a graph that cannot be drawn or weighted, and mixing matrices that do not fit the method."""
    given = [key for key in ("weights", "epsilon") if topology.own_weights and topology.is_given(key)]
    refuse_if(
        [
            (setup.num_clients < 2, "clients.count", "=1 client has no graph of peers; give at least 2"),
            (
                given,
                ".".join(["topology", *given[:1]]),
                f" does nothing with {getattr(topology, 'name', 'file')!r}, which has weights of its own; remove it",
            ),
        ]
    )
    if not setup.is_peer:
        setup.links(0)
        return
    can = setup.method.capabilities
    if can.needs_tree:
        check_tree(setup, topology, name)
    # Peers on their own clocks take the weights of the whole graph, whoever is absent.
    away = "" if setup.on_own_clocks else "".join(f", clients.{key}" for key in setup.away)
    # The graph of a file has lost its name.
    weights = "" if topology.own_weights else f", weights={topology.weights!r}"
    what = f"={getattr(topology, 'name', 'file')!r}{weights}{away}"
    if can.needs_everyone and can.needs_weights != "row" and (away or topology.varying):
        raise RayflError(
            f"{what} do not fit {name}, whose mixing matrix must be {can.needs_weights}, and the same in all rounds; "
            "take weights='metropolis' and a graph such as ring, whose links go both ways and do not change, with all "
            "clients in every round",
            ("topology",),
        )
    # A directed graph that is drawn every round is hardly symmetric eight times. MATCHA's weights are negative where
    # many matchings happen to be active.
    num_checked = 32 if topology.own_weights else 8
    for round_number in range(num_checked if topology.varying else 1):
        for missing in (0, 1, setup.num_clients // 2) if away and can.needs_weights != "row" else (0,):
            draws = generator(setup.seed, round_number, purpose="absent in a check")
            exchange = setup.exchange(round_number, draws.permutation(setup.num_clients) >= missing)
            graph = graph_among(setup, exchange)
            try:
                setup.peer_half.mixing(mixing_weights(setup, graph, exchange), exchange)
            except RayflError as error:
                whoever = " whichever peers are absent" if missing else ""
                raise RayflError(f"{what} is not possible with {name}{whoever}: {error}", ("topology",)) from None


def check_tree(setup: Setup, topology: Topology, name: str) -> None:
    """Reject a graph that is no tree, or that changes."""
    graph = topology.sparse(setup.num_clients, setup.seed, 0)
    why = {
        "changes from round to round": topology.varying,
        "has links that go one way": not is_symmetric(graph),
        "is in several parts": not connected(graph),
        f"has a cycle, with {graph.nnz // 2} links for {setup.num_clients} peers": graph.nnz >= 2 * setup.num_clients,
    }
    needs = "a tree, such as grid with rows=1, or the spanning tree of a graph: {name='spanning-tree', base='ring'}"
    given = getattr(topology, "name", "file")
    refuse_if((is_so, "topology", f"={given!r} {reason}, and {name} needs {needs}") for reason, is_so in why.items())


def check_evaluation(setup: Setup) -> None:
    """Reject evaluation settings that have no effect."""
    here = setup.evaluation
    by_client = here.by_client or bool(setup.unseen)
    cause = "masks=true compares those of all" if here.masks else "own=false evaluates none of them"
    refuse_if(
        [
            (
                here.clients and here.clients > setup.num_clients,
                "evaluation.clients",
                f"={here.clients} is more than the {setup.num_clients} clients that rounds ask; lower it",
            ),
            (
                here.clients and (here.masks or not here.by_client),
                "evaluation.clients",
                f"={here.clients} is a sample of clients, and evaluation.{cause}; remove one of them",
            ),
            (
                here.merged and not by_client,
                "evaluation.merged",
                "=true adds up the metrics of clients' own data, and evaluation.own=false; remove one of them",
            ),
            (
                here.metrics and not by_client and (setup.is_peer or not here.pooled),
                "evaluation.metrics",
                " are given, and no model is evaluated: set evaluation.own=true, or remove them",
            ),
            (
                not setup.metric_facts,
                "evaluation.metrics",
                " names no metric, and the task has none of its own; name one",
            ),
        ]
    )


def checked_stop(stop: EarlyStop, setup: Setup) -> StopRule:
    """The rule of an early stop. Raise RayflError if its metric does not exist, or is not evaluated here."""
    here = setup.evaluation
    rule = stop_rule(stop, setup.metric_facts, here.own)
    needs = {
        "pooled": (here.pooled and not setup.is_peer, "evaluation.pooled=true and a method with one model for all"),
        "own": (here.own, "evaluation.own=true"),
        "unseen": (bool(setup.unseen), "clients.unseen"),
        "personal_pooled": (here.personal_on_pooled, "evaluation.personal_on_pooled=true"),
        **{f"{place}_train": (here.train, "evaluation.train=true") for place in ("pooled", "own", "unseen")},
    }
    place = max((place for place in needs if rule.metric.startswith(place)), key=len, default="own")
    is_evaluated, need = needs[place]
    if not is_evaluated:
        raise RayflError(f"={rule.metric!r} needs {need}; set that, or choose another metric", ("stop", "metric"))
    return rule


def check_unseen(setup: Setup, name: str) -> None:
    """Reject unseen clients without test examples, and methods that have no model for a client that is new."""
    can, offsets = setup.method.capabilities, setup.partition.test.offsets
    has_model = can.newcomer != "undefined" and not setup.is_peer
    refuse_if(
        [
            (
                not (has_model or (can.newcomer == "model" and can.evaluated_from_mean)),
                "clients.unseen",
                f" leaves out clients for which {name}, with these settings, defines no model when they come for the "
                "first time; remove it",
            ),
            (
                offsets[-1] <= offsets[setup.num_clients],
                "clients.unseen",
                " leaves out clients that have no test examples; raise it, or change the partition",
            ),
        ]
    )


def check_retention(method: Method, uplink: Compressor, clients: Clients) -> None:
    """Reject retention ratios that neither method nor uplink uses, or that the method's theory does not cover."""
    can = method.capabilities
    if clients.retention_ratio is None or can.honours_retention:
        return
    refuse_if(
        [
            (
                uplink.keeping(1.0) is None,
                "clients.retention_ratio",
                f" is used by neither {method.title} nor the uplink {uplink.name!r}; remove it, or take a method that "
                "keeps or sends a share of the model, or an uplink that does, for example topk",
            ),
            (
                can.needs_one_omega and not (can.own_feedback and uplink.omega(1) is None),
                "clients.retention_ratio",
                f" gives every client an uplink of its own, but {method.title} needs the same for all; remove it",
            ),
        ]
    )


def check_feedback(setup: Setup) -> None:
    """Reject compressors whose memory the method has already, or whose memory the server does not keep."""
    for key, compressor in (("uplink", setup.uplink), ("downlink", setup.downlink)):
        # `init` raises an error for feedback around feedback. An error memory has its tensor's name.
        memory = compressor.init(setup.initial)
        has_own_feedback = key in setup.method.capabilities.own_feedback
        if has_own_feedback and (memory.keys() & setup.initial.keys() or (key == "downlink" and memory)):
            raise RayflError(
                f"={compressor.name!r} has a memory, and {setup.method.title} itself sends later what {key} leaves "
                "out; give a compressor without a memory, for example the one inside feedback",
                (key,),
            )


def check_splits(method: Method, partition: Partition) -> None:
    """Reject a partition that left a split empty that the method needs."""
    for split, share in method.splits.items():
        if not len(partition.split(split).indices):
            name = method.title if split in method.innermost.splits else "a wrapper of the method"
            raise RayflError(f"{name} needs {split} examples; set splits.{split}_ratio (for example {share})")
