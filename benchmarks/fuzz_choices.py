"""What the random experiments of `python -m benchmarks fuzz` are drawn from.

A seed must make the same experiment for ever, so nothing here is changed or moved once it is committed. What is new
goes under the next version: `{1: (...), 2: (new, ...)}`, and `LATEST` is raised. Version 1 then still draws from the
first tuple alone, and `--generator 1` repeats its seeds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

LATEST = 3
"""The newest version of the generator."""

# Any: values of settings, or tables of them.
Choices = Mapping[int, Sequence[Any]]

METHODS: Choices = {
    1: (
        *("adiana", "apfl", "avr_weipru", "beer", "choco", "dcgd", "deepsqueeze", "dfedu", "diana", "dispfl", "ditto"),
        *("doublesqueeze", "dpsgd", "dpsgd_ft", "dsgdprox", "easgd", "ef21", "ef21_bc", "fedala", "fedavg"),
        *("fedavg_ft", "fedavgm", "feddyn", "fedfomo", "fedmgda", "fednova", "fedopt", "fedpd", "fedproto", "fedprox"),
        *("fedpse", "fedscr", "fedsgd", "fedstc", "fedu", "fetchsgd", "ifca", "ind_mask", "ind_weipru", "l2gd", "lag"),
        *("lag_ps", "local", "lottery_dsgd", "lotteryfl", "marina", "mcepl", "mixture_admm", "moon", "onebit"),
        *("par_weipru", "perfedavg", "pfedmac", "pfedme", "pfnm", "qsgd", "scaffnew", "scaffold", "signsgd", "stem"),
        *("subfedavg", "terngrad"),
        # Most schedules, wrappers, selections and compressors are for these alone: they come as often as twenty others.
        *(("fedavg", "fedopt", "fedprox", "fedavgm", "ditto", "moon", "fedpse") * 3)[:20],
    ),
    2: (
        *("adpsgd", "d2", "dfedavgm", "dfedsam", "dsgt", "fedacg", "fedcp", "feddbe", "feddc", "feddropout", "feddst"),
        *("fedexp", "fedlesam", "fedpac", "fedpm", "fedrod", "fedrolex", "fedsam", "fedspeed", "fjord", "flash"),
        *("flexlora", "flora", "gpfl", "heterofl", "hetlora", "kgt", "knn_per", "led", "mimelite", "pfedhn"),
        *("qfedavg", "relaysgd", "sgp"),
    ),
    3: ("feddisco", "fedpd_vr", "fedphp", "fedsplit", "fsvrg", "vrl_sgd"),
}

_RETENTION = {"fil": 40, "fil_share": 1.0, "batch_size": 16}
NEEDED: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("avr_weipru", "ind_mask", "ind_weipru", "mcepl", "par_weipru"), _RETENTION),
    **{name: {"min_accuracy": 0.05, "epochs": 2, "lr": 0.1} for name in ("lotteryfl", "subfedavg")},
    "adiana": {"refresh_probability": 0.6, "eta": 0.05},
    "easgd": {"steps": 3},
    "fedala": {"first_passes": 3},
    "fedpd": {"skip_probability": 0.3},
    "fedpd_vr": {"skip_probability": 0.3},
    "l2gd": {"p": 0.5, "lam": 0.5},
    "lottery_dsgd": {"min_accuracy": 0.05, "steps": 4, "lr": 0.1},
    "marina": {"dense_probability": 0.6},
    "mixture_admm": {"rho": 5.0},
    "perfedavg": {"steps": 3},
    "pfedmac": {"steps": 3, "inner_steps": 2},
    "pfedme": {"steps": 3, "inner_steps": 2},
    "stem": {"steps": 3},
}
"""Settings with which a method does in a few small rounds all that it can do: gates that open, coins of both sides."""

_ADAPTERS = {"layers": ["*"], "rank": 4}
NEEDED_TABLES: Mapping[str, Mapping[str, Any]] = {
    "flexlora": {"adapters": _ADAPTERS},
    "hetlora": {"adapters": _ADAPTERS},
    "flora": {"adapters": {**_ADAPTERS, "merged": True}},
}
"""Tables without which a method is refused."""

HYPER: Mapping[str, Choices] = {
    "batch_size": {1: (0, 7, 16)},
    "clip_norm": {1: (0.5,)},
    "epochs": {1: (2,)},
    "l1": {1: (0.001,)},
    "l2": {1: (0.01,)},
    "lr": {1: (0.01, 0.02)},
    "lr_decay": {1: (0.9,)},
    "lr_schedule": {1: ("cosine", "constant")},
    "momentum": {1: (0.5, 0.9)},
    "optimizer": {1: ("adam", "nesterov", "adamw")},
    "steps": {1: (2, 3)},
    "weight_decay": {1: (0.01,)},
    "weighting": {1: ("uniform", "samples")},
    # Those of one method, or of a family.
    "adiana.alpha": {1: (0.5,)},
    "apfl.alpha_lr": {1: (0.05,)},
    "beer.hats": {1: ("zero",)},
    "choco.hats": {1: ("zero",)},
    "choco.order": {1: ("mix_first",)},
    "diana.start": {1: ("gradient",)},
    "dispfl.different_initial": {1: (False,)},
    "dispfl.distribution": {1: ("uniform",)},
    "dispfl.regrow": {1: ("random",)},
    "ditto.personal_epochs": {1: (2,)},
    "ditto.pull": {1: ("after",)},
    "dpsgd.density": {1: (0.5,)},
    "dpsgd.order": {1: ("lian",)},
    "dpsgd_ft.ft_from": {1: ("own",)},
    "fedfomo.num_candidates": {1: (2,)},
    "feddyn.judged": {1: ("cloud",)},
    "fedopt.server_optimizer": {1: ("adagrad", "yogi")},
    "fedpse.absent": {1: ("nothing",)},
    "fedscr.keep_ratio": {1: (0.4,)},
    "mcepl.weight_init": {1: ("signed_constant", "kaiming")},
    "mixture_admm.x_step": {1: ("closed_form",)},
    "onebit.error_feedback": {1: (False,)},
    "perfedavg.variant": {1: ("fo", "exact")},
    "pfedmac.personal": {1: ("w",)},
    "pfedme.personal": {1: ("w",)},
    "pfnm.independent_start": {1: (True,)},
    "qsgd.coding": {1: ("elias",)},
    "scaffold.option": {1: ("I",)},
    "signsgd.momentum": {1: (0.9,)},
    "fetchsgd.momentum": {1: (0.5,)},
}
"""Settings of methods that have them, by name, or by "METHOD.NAME" for one method; each is given now and then."""

DATA: Choices = {
    1: (
        {"name": "synthetic", "num_groups": 8, "samples_per_group": 40, "dim": 12, "num_classes": 4},
        {"name": "synthetic", "num_groups": 8, "samples_per_group": 30, "shape": [1, 8, 8], "num_classes": 5},
        {"name": "synthetic", "num_groups": 8, "samples_per_group": 20, "shape": [3, 16, 16], "num_classes": 3},
        {"name": "digits"},
    )
}
PARTITIONS: Choices = {
    1: (
        {"name": "iid"},
        {"name": "natural"},
        {"name": "dirichlet-class", "alpha": 1.0, "min_samples": 4},
        {"name": "dirichlet-client", "alpha": 0.5, "test_samples": 9},
        {"name": "dirichlet-sizes", "sigma": 1.0},
        {"name": "shared-groups", "num_groups": 2},
        {"name": "pathological", "classes_per_client": 2, "test_samples": 9},
        {"name": "labels-per-client", "labels_per_client": 2},
        {"name": "lambda-ratio", "ratio": 0.5},
    )
}
MODELS: Choices = {
    1: (
        {"name": "mlp", "hidden": [10]},
        {"name": "mlp", "hidden": [8, 6]},
        {"name": "logistic"},
        {"name": "benchmarks.fuzz_models:Normed"},
        {"name": "benchmarks.fuzz_models:Dropping"},
        {"name": "convnet2", "channels": [2, 3], "hidden": [8]},
    )
}
UPLINKS: Choices = {
    1: (
        *({"name": name} for name in ("natural", "onebit", "qsgd", "sign", "terngrad", "bernoulli", "compose")),
        *({"name": name, "keep_ratio": 0.2} for name in ("topk", "randk", "stc", "structured", "countsketch")),
        {"name": "dense", "dtype": "fp16"},
        {"name": "eden", "bits": 2},
        {"name": "powersgd", "rank": 1},
        {"name": "threshold", "threshold": 0.1, "relative": True},
        {"name": "quantize", "norm": "inf"},
        {"name": "lossless"},
        {"name": "feedback", "inner": {"name": "topk", "keep_ratio": 0.2}},
        {"name": "feedback", "inner": {"name": "sign"}},
        {"name": "lossless", "inner": {"name": "qsgd"}},
    )
}
DOWNLINKS: Choices = {
    1: (
        {"name": "topk", "keep_ratio": 0.3},
        {"name": "qsgd"},
        {"name": "dense", "dtype": "bf16"},
        {"name": "dense", "dtype": "fp16"},
        {"name": "natural"},
        {"name": "randk", "keep_ratio": 0.5},
    )
}
WRAPPERS: Choices = {
    1: (
        {"name": "attack"},
        {"name": "attack", "kind": "gaussian", "share": 0.4},
        {"name": "clip", "norm": 0.5},
        {"name": "clip", "norm": 0.5, "quantile": 0.5},
        {"name": "central-dp", "norm": 1.0, "noise_multiplier": 0.5},
        {"name": "local-dp", "norm": 1.0, "noise_multiplier": 0.5},
        {"name": "coordinate-median"},
        {"name": "trimmed-mean"},
        {"name": "krum", "byzantine": 1},
        {"name": "geometric-median", "steps": 4},
        {"name": "centered-clipping"},
        {"name": "elastic"},
    )
}
SELECTIONS: Choices = {
    1: (
        *({"name": name} for name in ("oort", "poisson", "weighted", "round-robin")),
        *({"name": "power-of-choice", "variant": variant} for variant in ("pow-d", "cpow-d", "rpow-d")),
    )
}
PEER_SCHEDULES: Choices = {
    2: (
        {"name": "gossip"},
        {"name": "gossip", "latency_s": 0.05},
        {"name": "gossip", "most_staleness": 1.5},
        {"name": "gossip", "partners": 1, "latency_s": 0.01},
    )
}
"""Those of methods without a server."""
SCHEDULES: Choices = {
    1: (
        {"name": "buffered", "buffer": 1},
        {"name": "buffered", "buffer": 2, "staleness": "constant"},
        {"name": "buffered", "buffer": 3, "most_staleness": 1},
        {"name": "asynchronous"},
        {"name": "asynchronous", "staleness": "hinge", "hinge": 0},
        {"name": "semi-synchronous", "period_s": 0.05},
        {"name": "semi-synchronous", "period_s": 0.4},
    )
}
TOPOLOGIES: Choices = {
    1: (
        *({"name": name} for name in ("ring", "grid", "torus", "exponential", "one-peer-exponential")),
        {"name": "fully-connected"},
        {"name": "erdos-renyi", "p": 0.6},
        {"name": "random", "degree": 2},
        {"name": "random-regular", "degree": 2},
    ),
    2: (
        {"name": "epidemic", "degree": 2},
        {"name": "geometric"},
        {"name": "matcha", "base": {"name": "erdos-renyi", "p": 0.6}},
        {"name": "small-world", "neighbours": 2},
        {"name": "spanning-tree", "base": "ring"},
    ),
}
CLIENTS: Mapping[str, Choices] = {
    "unseen": {1: (0.3,)},
    "dropout_before_download": {1: (0.3,)},
    "dropout_after_download": {1: (0.3,)},
    "dropout_after_training": {1: (0.3,)},
    "upload_loss": {1: (0.3,)},
    "availability": {1: ({"probability": 0.7}, {"period": 4.0, "low": 0.2})},
    "examples_per_s": {1: ({"median": 200.0, "sigma": 1.0}, [100.0, 400.0], {"low": 50.0, "high": 500.0}, 300.0)},
    "uplink_mbps": {1: ({"median": 0.05, "sigma": 1.0}, 0.05)},
    "downlink_mbps": {1: ({"median": 0.05, "sigma": 1.0}, 0.05)},
    "deadline_s": {1: (0.2, 1.0)},
    "take_first": {1: (2,)},
    "work": {1: ("capacity",)},
    "retention_ratio": {1: ([0.3, 0.6],)},
    "sparse_speedup": {1: (True,)},
}
"""Heterogeneity and faults: each is given now and then."""
PARTS: Choices = {
    1: (
        {"buffers": "personal"},
        {"buffers": "frozen"},
        {"personal": ["*bias"]},
        {"personal": ["*bias"], "order": "local-first"},
        {"personal": ["*weight"], "order": "shared-first", "personal_steps": 2},
        {"personal": ["*bias"], "buffers": "personal"},
    )
}
ADAPTERS: Choices = {1: ({"layers": ["*"], "rank": 2},)}
SPLITS: Mapping[str, Choices] = {"validation_ratio": {1: (0.25,)}, "heldout_ratio": {1: (0.3,)}}
EVALUATION: Mapping[str, Choices] = {
    "pooled": {1: (False,)},
    "own": {1: (False,)},
    "personal_on_pooled": {1: (True,)},
    "train": {1: (True,)},
    "clients": {1: (2,)},
    "merged": {1: (True,)},
    "masks": {1: (True,)},
    "split": {1: ("validation",)},
    "metrics": {
        1: (
            ["accuracy", "loss", "f1", "ece"],
            ["loss", "auroc", "recall"],
            ["accuracy", "loss", "precision", {"name": "top-k", "k": 2}],
            ["loss", "accuracy", "nll", "confusion"],
        )
    },
}
"""Measurements: each is given now and then."""


# Any: one of the values.
def of_version(choices: Choices, version: int) -> Sequence[Any]:
    """The values from which a version of the generator draws."""
    return [value for since, values in sorted(choices.items()) if since <= version for value in values]
