"""The texts for metrics, numbers and settings on a page. 1 MB = 1e6 bytes."""

from collections.abc import Mapping

from rayfl.choices.plugins import short
from rayfl.metrics.facts import RECORDED_BEFORE, Facts

NONE = "\u2013"
"""A table's cell without a value."""
PLUS_MINUS = "\u00b1"

PLACES = {
    "pooled": (
        "Shared model, pooled test set",
        "the global model, on test data of all clients together",
    ),
    "own": (
        "Own test data, after the exchange",
        "each client's model after the exchange, before further training, on its own test data",
    ),
    "own_after_training": (
        "Own test data, after local training",
        "each client's model right after its local training, on its own test data",
    ),
    "unseen": (
        "Unseen clients, own test data",
        "the models of clients that take part in no round, evaluated as new clients, on their own test data",
    ),
    "unseen_after_training": (
        "Unseen clients, after local training",
        "the models of clients that take part in no round, right after their first training, on their own test data",
    ),
    "unseen_before_adapting": (
        "Unseen clients, shared model",
        "the server's model, as clients that take part in no round receive it, on their own test data",
    ),
    "pooled_train": (
        "Shared model, training data of all clients",
        "the global model, on the training examples of all clients",
    ),
    "own_train": (
        "Own training data, after the exchange",
        "each client's model after the exchange, on the examples with which the client trains",
    ),
    "own_train_after_training": (
        "Own training data, after local training",
        "each client's model right after local training, on the examples with which the client trained",
    ),
    "unseen_train": (
        "Unseen clients, own training data",
        "the models of clients that take part in no round, evaluated as new clients, on the examples they adapt to",
    ),
    "unseen_train_after_training": (
        "Unseen clients, own training data, after local training",
        "the models of clients that take part in no round, right after their first training, on what they trained on",
    ),
    "personal_pooled": (
        "Own models, pooled test set, after the exchange",
        "each client's model after the exchange, on test data of all clients together",
    ),
    "personal_pooled_after_training": (
        "Own models, pooled test set, after local training",
        "each client's model right after its local training, on test data of all clients together",
    ),
}
"""A title for each moment at which `rayfl.rounds.evaluation` evaluates models, and which model on which data."""


_METRICS: Mapping[str, tuple[str, str, str]] = {
    "train/loss": (
        "Training loss",
        "mean per example",
        "The mean loss over the examples of local training; it should fall. Of methods that train on a sum of losses "
        "it is that sum (`rayfl methods NAME` says so).",
    ),
    "correlation_distance": (
        "Correlation distance",
        "0 to 1",
        "FedPSE's distance d = 0.5 - 0.5 cos between the average update and a client's own: 0 is the same direction, "
        "1 the opposite one.",
    ),
    "correlation_distance_variance": (
        "Variance of the correlation distances",
        "",
        "The variance of FedPSE's distances d over a round's clients (its Table 3).",
    ),
    "comm/busiest_megabytes": (
        "Comm of the busiest node",
        "MB per round",
        "Papers call this Comm: 4 bytes for each number that the busiest peer, the server or a client sends or "
        "receives, whichever is more. A number counts 4 bytes whatever its width.",
    ),
    "comm/busiest_received_megabytes": (
        "Comm of the busiest receiver",
        "MB per round",
        "As Comm of the busiest node, of downloads alone, as in Dis-PFL's tables, where all peers receive from "
        "equally many neighbours.",
    ),
    "comm/mean_megabytes": (
        "Comm of a client",
        "MB per round",
        "The mean Comm over peers or clients, up or down, whichever is more; positions do not count.",
    ),
    "comm/link_megabytes": (
        "Comm of a link as MCE-PL bills it",
        "MB per round",
        "The cost of a link in MCE-PL's paper: one bit per entry of a mask, 4 bytes per weight.",
    ),
    "comm/link_ones_megabytes": (
        "Ones in a mask, in bits",
        "MB per round",
        "The cost of a link in the code of MCE-PL's authors: one bit for each 1 in a mask.",
    ),
    "flops/training": (
        "Operations of a client's training",
        "floating-point operations per round",
        "As papers count: three forward passes per example and gradient (two for frozen weights), kept weights only.",
    ),
    "population/available": ("Available clients", "clients", "How many clients were available when the round began."),
    "flight/staleness": (
        "Staleness of messages",
        "updates",
        "How many updates of the server a client missed between its start and its end. Of peers: how many rounds old "
        "the messages were that a peer mixed; in pairs: how often others changed its model while it trained.",
    ),
    "flight/idle_share": (
        "Idle share",
        "0 to 1",
        "The share of the concurrency (the most clients that train at once; all peers) that was unused in the round.",
    ),
    "flight/version": (
        "Version that clients began with",
        "updates",
        "The number of updates of the server before a client began.",
    ),
    "flight/began_s": (
        "Start of clients",
        "simulated s",
        "The start times of the clients that ended since the last update.",
    ),
    "flight/ended_s": ("End of clients", "simulated s", "The times at which clients ended since the last update."),
    "graph/mean_degree": (
        "Neighbours of a peer, mean",
        "peers",
        "The mean number of peers from which a peer receives in the round's graph.",
    ),
    "graph/max_degree": (
        "Neighbours of a peer, most",
        "peers",
        "The largest number of peers from which a peer receives in the round's graph.",
    ),
    "graph/connected": (
        "Whether the round's graph is connected",
        "1: yes, 0: no",
        "Whether a change at one peer can reach every peer that took part.",
    ),
    "graph/spectral_gap": (
        "Spectral gap of the round's mixing matrix",
        "0 to 1",
        "The larger it is, the faster averaging with neighbours brings all peers to one model.",
    ),
    "mask/hamming": (
        "Distance of masks",
        "%",
        "The share of entries that one client of a pair keeps and the other does not.",
    ),
    "mask/hamming_label_correlation": (
        "Correlation of mask distance and label similarity",
        "-1 to 1",
        "Over pairs of clients; if it is below zero, clients with similar labels keep similar entries.",
    ),
    "labels/similarity": (
        "Similarity of labels",
        "0 to 1",
        "The cosine between two clients' distributions of training labels.",
    ),
    "admm/residual": (
        "Residual of the constraint",
        "norm",
        "How far the mixture is from meeting ADMM's constraint; it should fall.",
    ),
    "elastic/boosted_share": (
        "Share of boosted entries",
        "0 to 1",
        "The share of the update's entries that elastic aggregation enlarges.",
    ),
    "elastic/mean_factor": (
        "Mean factor of the update",
        "",
        "The mean over the update's entries of elastic aggregation's factor zeta.",
    ),
    "ifca/cluster": ("Cluster", "number", "The cluster whose model the client chose, counted from 0."),
    "clip/norm": ("Norm of a message", "norm", "The Euclidean norm of a client's message before clipping."),
    "clip/clipped": ("Clipped messages", "0 to 1", "The share of the round's messages that were clipped."),
    "clip/bound": ("Clipping norm", "norm", "The norm to which messages were clipped in the round."),
    "privacy/epsilon": (
        "Epsilon so far",
        "epsilon",
        "The epsilon of differential privacy up to this round, at the settings' delta.",
    ),
    "attack/share": ("Attackers", "0 to 1", "The share of the round's messages that attackers sent."),
    "fedmgda/direction_norm": (
        "Norm of the common direction",
        "norm",
        "The norm of FedMGDA's combination of unit updates; if it is near 0, no direction helps all clients.",
    ),
    "feddisco/largest_weight": (
        "Largest weight of a client",
        "0 to 1",
        "The largest weight that FedDisco gave to a client of the round.",
    ),
    "fedexp/server_lr": (
        "Learning rate of FedExP's server",
        "",
        "1 is FedAvg's step; if it keeps growing, raise method.epsilon.",
    ),
    "qfedavg/loss": (
        "Loss before training",
        "loss",
        "The loss of the received model on the client's training examples.",
    ),
    "marina/dense": (
        "Rounds of uncompressed gradients",
        "1: yes, 0: no",
        "Whether MARINA's clients sent uncompressed gradients.",
    ),
    "pfnm/hidden_neurons": (
        "Hidden neurons of the matched model",
        "neurons",
        "The number of hidden neurons after PFNM has matched those of the clients.",
    ),
    "threshold": (
        "Threshold of the updates",
        "",
        "FedSCR's threshold below which a client's filters and channels are not sent.",
    ),
}
"""The title, unit ("" for a number without one) and meaning of metrics that methods and wrappers record."""
_OVER_CLIENTS = {
    "_merged": ("of all clients together", "one value from the sums of all clients"),
    "_weighted": ("weighted by examples", "the mean of the clients' values, weighted by their examples"),
    "_deviation": ("deviation over clients", "the standard deviation over clients"),
    "_worst_tenth": ("worst 10 % of clients", "the mean of the worst 10 % of clients, rounded up to whole ones"),
    "_worst": ("worst client", "the worst client's value"),
    "_difference": ("best minus worst client", "the distance from the best to the worst client"),
    "_jain": ("Jain's index over clients", "Jain's index over clients, (sum a)^2 / (n sum a^2)"),
}
"""Titles and meanings of the endings of a place's name: what the value is over clients."""
NAMES = (*(f"{place}/{what}" for place in PLACES for what in RECORDED_BEFORE), *_METRICS)
"""The metrics that have a title of their own in every run."""


def metric(name: str, facts: Facts | None = None) -> Facts:
    """The title, unit and meaning (a sentence) of a metric; its recorded name if nothing is known about it.

    facts: of the value that it evaluates; None: those of the metrics that every run has.
    """
    if name in _METRICS:
        long_title, unit, meaning = _METRICS[name]
        return Facts(title=long_title, unit=unit, meaning=meaning)
    place, _, what = name.partition("/")
    facts = facts or RECORDED_BEFORE.get(what or place)
    ending = next((suffix for suffix in _OVER_CLIENTS if place.endswith(suffix)), "")
    if place.removesuffix(ending) not in PLACES:
        return Facts(title=name, unit=facts.unit if facts else "", meaning=f"Recorded as {name}.")
    facts = facts or Facts(title=what.capitalize(), meaning=f"{what.capitalize()}, as the task evaluates it")
    short, long = PLACES[place.removesuffix(ending)]
    if ending:
        short, long = f"{short}, {_OVER_CLIENTS[ending][0]}", f"{long} ({_OVER_CLIENTS[ending][1]})"
    return Facts(title=f"{facts.title}: {short}", unit=facts.unit, meaning=f"{facts.meaning} of {long}.")


def title(name: str, facts: Facts | None = None) -> str:
    """The title of a metric."""
    return metric(name, facts).title


def axis_title(facts: Facts) -> str:
    """A value with its unit: "Accuracy, %"."""
    return f"{facts.title}, {facts.unit}" if facts.unit not in ("", facts.title) else facts.title


def value(setting: object) -> str:
    """A setting: yes, no, none, a list's items, a class with its options, a short number."""
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    if setting is None or isinstance(setting, list | tuple):
        return ", ".join(map(value, setting or ())) or "none"
    if isinstance(setting, dict) and "name" in setting:
        options = ", ".join(f"{name} {value(item)}" for name, item in setting.items() if name != "name")
        return short(str(setting["name"])) + f" ({options})" * bool(options)
    return f"{setting:g}" if isinstance(setting, float) else str(setting)


def counted(number: int, word: str) -> str:
    """1 run, 2 runs."""
    return f"{number} {word}" + "s" * (number != 1)


def amount(number: float) -> str:
    """A count or a mean of counts: 1,437, 44.5."""
    return f"{number:,.{0 if number == int(number) or number >= 1000 else 1}f}"


def percent(share: float) -> str:
    """0.123 is 12.3 %."""
    return f"{100 * share:.1f} %"


def megabytes(amount: float) -> str:
    """Megabytes with about three digits."""
    return f"{amount:,.{megabyte_decimals(amount)}f} MB"


def megabyte_decimals(amount: float) -> int:
    """The number of decimals with which megabytes are shown."""
    return 0 if amount == 0 else 3 if amount < 1 else 2 if amount < 10 else 1 if amount < 100 else 0


def seconds(amount: float) -> str:
    """Seconds, minutes or hours."""
    if amount < 120:
        return f"{amount:.1f} s"
    minutes, rest = divmod(round(amount), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
