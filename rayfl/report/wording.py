"""Metrics, numbers and settings in words, as a page shows them. 1 MB = 1e6 bytes."""

from typing import NamedTuple

from rayfl.report.series import is_accuracy

NONE = "\u2013"
"""Where there is no value."""
PLUS_MINUS = "\u00b1"

_PLACES = {
    "pooled": (
        "Shared model, pooled test set",
        "the model that the server holds, on test data of all clients together",
    ),
    "own": (
        "Own test data, after the exchange",
        "each client's model as the exchange left it, before it trains on, on its own test data",
    ),
    "own_after_training": (
        "Own test data, after local training",
        "each client's model right after its local training, on its own test data",
    ),
    "pooled_train": (
        "Shared model, training data of all clients",
        "the model that the server holds, on the training examples of all clients",
    ),
    "own_train": (
        "Own training data, after the exchange",
        "each client's model as the exchange left it, on the examples that it trains on",
    ),
    "own_train_after_training": (
        "Own training data, after local training",
        "each client's model right after local training, on what it trained on",
    ),
    "personal_pooled": (
        "Own models, pooled test set, after the exchange",
        "each client's model as the exchange left it, on test data of all clients together",
    ),
    "personal_pooled_after_training": (
        "Own models, pooled test set, after local training",
        "each client's model right after its local training, on test data of all clients together",
    ),
}
"""The moments at which `rayfl.rounds.evaluation` evaluates models: in short, and which model on which data."""
_MEASURES = {
    "accuracy": ("%", "The share of right answers"),
    "loss": ("mean an example", "The mean loss (cross-entropy in nats, or the task's own)"),
}
"""The unit of what is evaluated there, and the beginning of a sentence."""


class Words(NamedTuple):
    """A metric in words: `unit` is "" for a number without one, `meaning` a sentence."""

    title: str
    unit: str
    meaning: str


_WORDS = {
    "train/loss": Words(
        "Training loss", "mean an example", "How far the models are from the answers while they learn; it should fall."
    ),
    "correlation_distance": Words(
        "Correlation distance",
        "0 to 1",
        "FedPSE's distance d = 0.5 - 0.5 cos between the average update and a client's own: 0 is the same direction, "
        "1 the opposite one.",
    ),
    "correlation_distance_variance": Words(
        "Variance of the correlation distances",
        "",
        "The variance of FedPSE's distances d over a round's clients (its Table 3).",
    ),
    "comm/busiest_megabytes": Words(
        "Comm of the busiest node",
        "MB a round",
        "What papers call Comm: 4 bytes a number that the busiest peer, or the server, receives.",
    ),
    "comm/mean_megabytes": Words(
        "Comm of a client",
        "MB a round",
        "Comm on average over peers or clients; positions and masks are not in it.",
    ),
    "comm/link_megabytes": Words(
        "Comm of a link as MCE-PL bills it",
        "MB a round",
        "What MCE-PL's paper bills a link: a bit for an entry of a mask, 4 bytes for a weight.",
    ),
    "comm/link_ones_megabytes": Words(
        "Ones in a mask, in bits",
        "MB a round",
        "What the code of MCE-PL's authors bills a link: a bit for each one in a mask.",
    ),
    "flops/training": Words(
        "Operations of a client's training",
        "floating-point operations a round",
        "As papers count: three forward passes an example and gradient, of kept weights only.",
    ),
    "population/available": Words(
        "Clients that could be reached", "clients", "How many clients were available when the round began."
    ),
    "graph/mean_degree": Words(
        "Peers that one receives from, mean", "peers", "The round's graph: of how many others a peer hears on average."
    ),
    "graph/max_degree": Words(
        "Peers that one receives from, most", "peers", "The round's graph: of how many others the best connected hears."
    ),
    "graph/connected": Words(
        "Whether the round's graph is connected", "1: yes, 0: no", "Whether news can reach every peer that took part."
    ),
    "graph/spectral_gap": Words(
        "Spectral gap of the round's mixing matrix",
        "0 to 1",
        "How fast averaging with neighbours brings all peers to one model: the larger the faster.",
    ),
    "mask/hamming": Words(
        "Distance of masks", "%", "The share of entries that one client of a pair keeps and the other does not."
    ),
    "mask/hamming_label_correlation": Words(
        "Correlation of mask distance and likeness of labels",
        "-1 to 1",
        "Over pairs of clients; below zero, clients of like labels keep like entries.",
    ),
    "labels/similarity": Words(
        "Likeness of labels", "0 to 1", "The cosine between two clients' distributions of training labels."
    ),
    "admm/residual": Words(
        "Residual of the constraint", "norm", "How far the mixture is from meeting ADMM's constraint; it should fall."
    ),
    "elastic/boosted_share": Words(
        "Share of boosted entries", "0 to 1", "The share of the update's entries that elastic aggregation enlarges."
    ),
    "fedmgda/direction_norm": Words(
        "Norm of the common direction",
        "norm",
        "Of FedMGDA's combination of unit updates: near 0 no direction serves all clients.",
    ),
    "marina/dense": Words(
        "Rounds of whole gradients", "1: yes, 0: no", "Whether MARINA's clients sent their gradients uncompressed."
    ),
    "pfnm/hidden_neurons": Words(
        "Hidden neurons of the matched model",
        "neurons",
        "How many hidden neurons PFNM's matching made of the clients'.",
    ),
    "threshold": Words(
        "Threshold of the updates", "", "FedSCR's limit below which a client's filters and channels are not sent."
    ),
}
NAMES = (*(f"{place}/{what}" for place in _PLACES for what in _MEASURES), *_WORDS)
"""The metrics that have words of their own."""


def words(name: str) -> Words:
    """A metric's name in words, its unit and its meaning; as it was recorded where it is nobody's known."""
    if name in _WORDS:
        return _WORDS[name]
    place, _, what = name.rpartition("/")
    if place in _PLACES:
        unit, measure = _MEASURES.get(what, ("", f"{what.capitalize()}, as the task evaluates it"))
        short, long = _PLACES[place]
        return Words(short if is_accuracy(name) else f"{what.capitalize()}: {short}", unit, f"{measure} of {long}.")
    return Words(name, "%" if is_accuracy(name) else "", f"Recorded as {name}.")


def title(name: str) -> str:
    """A metric's name in words, or as it was recorded."""
    return words(name).title


def meaning(name: str) -> str:
    """A sentence on what a metric measures."""
    return words(name).meaning


def value(given: object) -> str:
    """A setting: yes, no, none, a list's items, a short number."""
    if isinstance(given, bool) or given is None:
        return {True: "yes", False: "no", None: "none"}[given]
    if isinstance(given, list | tuple):
        return ", ".join(value(one) for one in given) if given else "none"
    return f"{given:g}" if isinstance(given, float) else str(given)


def counted(number: int, word: str) -> str:
    """1 run, 2 runs."""
    return f"{number} {word}" + "s" * (number != 1)


def percent(share: float) -> str:
    """0.123 is 12.3 %."""
    return f"{100 * share:.1f} %"


def short_percent(share: float) -> str:
    """0.8 is 80 %, 0.855 is 85.5 %."""
    return f"{100 * share:.6g} %"


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


def times_less(ratio: float) -> str:
    """The factor of saving in words: "31x less", "1.5x less", "as much"; "2.0x more" for a ratio below 1."""
    if 0.995 < ratio < 1.005:
        return "as much"
    factor, word = (ratio, "less") if ratio > 1 else (1 / ratio, "more")
    return f"{factor:,.{0 if factor >= 99.5 else 1 if factor >= 9.95 else 2}f}\u00d7 {word}"
