"""Every mistake in an experiment is one plain sentence with the full path of the key."""

from typing import Any

import pytest

from tests.experiment.test_experiment import experiment_of
from tests.refusals import refused

FEDAVG = {"method": "fedavg"}
INNER = {"name": "topk", "keep_ratio": 2.0}
UNION = ("number", "list", "median", "sigma", "low", "high")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"ronds": 3}, ["ronds", "rounds"]),
        ({"method": {"name": "fedpse", "keep_rato": 1}}, ["method.keep_rato", "keep_ratio"]),
        ({"runtime": {"actrs": 3}}, ["runtime.actrs", "actors"]),
        ({"data": {"name": "synthetic", "dims": 3}}, ["data.dims", "dim"]),
        ({"method": {"name": "fedavg", "learning_rate": 1}}, ["method.learning_rate", "'lr'"]),
        ({"method": {"name": "fedavg", "Local-Epochs": 1}},
         ["method.Local-Epochs", "epochs"]),
        ({"batchsize": 1}, ["batchsize", "method.batch_size"]),
        ({"clients": {"num_clients": 5}}, ["clients.num_clients", "count"]),
        ({"num_clients": 5}, ["num_clients", "clients.count"]),
        ({"lr": 0.1}, ["'lr'", "method.lr"]),
        (
            {"runtime": {"actors": "most"}},
            ["runtime.actors='most'", "at least 1", "all"],
        ),
        ({"runtime": {"labels": {"zone": 3}}},
         ["runtime.labels={'zone': 3}", "table", "texts"]),
        (
            {"runtime": {"labels": {"zone": "a,b"}}},
            ["runtime.labels", "zone", "a,b"],
        ),
        (
            {"runtime": {"labels": {"ray.io/node-id": "0a"}}},
            ["runtime.labels", "ray.io/node-id"],
        ),
        ({"runtime": {"seed": 3}}, ["runtime.seed", "unknown"]),
        ({"learning_rat": 0.1}, ["learning_rat", "unknown", "known"]),
        ({"method": {"name": "fedavg", "keep_ratio": 0.1, "lr": 0.1}},
         ["method.keep_ratio", "fedavg", "fedpse", "fedscr", "fedstc"]),
        ({"partition": {"name": "labels-per-client", "labels": 2}}, ["partition.labels", "'labels_per_client'"]),
        ({"partition": {"name": "iid", "labels": 2}}, ["partition.labels", "'labels_per_client' of 'labels-per"]),
        # Keys of the same name in two other tables mean something else.
        ({"partition": {"name": "pathological", "labels": 2}}, ["partition.labels", "classes_per_client"]),
        ({"patience": 3}, ["'patience'", "stop.patience"]),
        ({"partition": {"name": "iid", "ratio": 0.1}},
         ["partition.ratio", "lambda-ratio", "remove"]),
        ({"partition": {"name": "iid", "ratio": 0.1, "shards": 2}},
         ["partition.ratio", "lambda-ratio", "remove", "partition=iid", "partition.name=iid"]),
        ({"method": "fedspe"}, ["fedspe", "fedpse"]),
        ({"data": "digit"}, ["digit", "digits"]),
        ({"model": "convnet"}, ["convnet", "convnet2"]),
        ({"partition": "dirichlett"}, ["dirichlett", "unknown", "partition"]),
        (FEDAVG | {"uplink": "topkk"}, ["topkk", "topk"]),
        (FEDAVG | {"uplink": {"name": "feedback", "inner": {"name": "top"}}}, ["top", "unknown", "compressor"]),
        ({"topology": "rnig"}, ["rnig", "ring"]),
        ({"method": {"name": ["x"]}}, ["'x'", "unknown", "method"]),
        ({"method": {"lr": 0.1}}, ["method.name", "missing"]),
        ({"model": {}}, ["model.name", "missing"]),
        ({"method": 5}, ["method=5", "table"]),
        ({"uplink": [1]}, ["uplink=[1]", "table"]),
        ({"rounds": "5"}, ["rounds='5'", "at least 1"]),
        ({"rounds": 0}, ["rounds=0", "at least 1"]),
        ({"seed": -1}, ["seed=-1", "at least 0"]),
        ({"clients": 3}, ["clients=3", "table"]),
        ({"clients": {}}, ["clients.count", "missing"]),
        ({"name": "a/b"}, ["name='a/b'", "'.'", "'_'", "'-'"]),
        ({"name": ""}, ["name=''", "letters"]),
        ({"method": {"name": "fedpse", "keep_ratio": 2.0}},
         ["method.keep_ratio=2.0", "(0, 1]"]),
        ({"method": {"name": "fedpse", "keep_ratio": 0}},
         ["method.keep_ratio=0", "(0, 1]"]),
        ({"method": {"name": "fedpse", "lr": float("nan")}},
         ["method.lr=nan", "greater than 0"]),
        ({"method": {"name": "fedpse", "downstream": "topk"}},
         ["method.downstream='topk'", "dps", "broadcast_topk"]),
        ({"method": {"name": "fedavg", "epochs": 1, "steps": 2}},
         ["method.epochs=1", "steps=2", "both"]),
        ({"method": {"name": "fedavg", "optimizer": "adam", "momentum": 0.9}},
         ["method.momentum=0.9", "optimizer='adam'", "remove"]),
        ({"partition": {"name": "lambda-ratio", "ratio": 1.5}},
         ["partition.ratio=1.5", "[0, 1]"]),
        (FEDAVG | {"uplink": {"name": "topk", "keep_ratio": 0.0}}, ["uplink.keep_ratio=0.0", "(0, 1]"]),
        (FEDAVG | {"uplink": {"name": "feedback", "inner": INNER}}, ["uplink.inner.keep_ratio=2.0", "(0, 1]"]),
        ({"uplink": "topk"}, ["uplink", "its own way", "remove"]),
        ({"clients": {"count": 20, "per_round": 30}},
         ["clients.per_round=30", "20 clients", "lower", "raise"]),
        ({"clients": {"count": 20, "per_round": 2.5}},
         ["clients.per_round=2.5", "at least 1"]),
        ({"clients": {"count": 20, "per_round": 3, "fraction": 0.1}},
         ["clients.per_round=3", "fraction=0.1", "both"]),
        ({"clients": {"count": 20, "fraction": 1.5}},
         ["clients.fraction=1.5", "(0, 1]"]),
        ({"clients": {"count": 20, "retention_ratio": "x"}},
         ["clients.retention_ratio='x'", "number", "list", "low", "high"]),
        ({"clients": {"count": 20, "retention_ratio": [0.5, 1.5]}},
         ["clients.retention_ratio=[0.5, 1.5]", "(0, 1]"]),
        ({"clients": {"count": 20, "retention_ratio": []}},
         ["clients.retention_ratio=[]", "a list of numbers in (0, 1]"]),
        ({"clients": {"count": 20, "retention_ratio": 1.5}},
         ["clients.retention_ratio=1.5", "(0, 1]"]),
        ({"clients": {"count": 20, "retention_ratio": {"low": 0.5, "high": 1.5}}},
         ["clients.retention_ratio.high=1.5", "(0, 1]"]),
        ({"clients": {"count": 20, "retention_ratio": {"low": 0.5, "high": 0.5}}},
         ["clients.retention_ratio.low=0.5", "below high=0.5"]),
        ({"clients": {"count": 20, "retention_ratio": {"median": 0.5, "sigma": 1.5}}},
         ["clients.retention_ratio", "(0, 1]"]),
        ({"clients": {"count": 20, "uplink_mbps": [1, -2]}},
         ["clients.uplink_mbps=[1, -2]", "[1e-09, 1e+12]"]),
        ({"clients": {"count": 20, "uplink_mbps": []}}, ["clients.uplink_mbps=[]", "a list of numbers"]),
        ({"clients": {"count": 20, "uplink_mbps": "x"}}, ["clients.uplink_mbps='x'", *UNION]),
        ({"model": {"name": "mlp", "hidden": [10, 0]}},
         ["model.hidden=[10, 0]", "at least 1"]),
        ({"evaluation": {"every": -1}}, ["evaluation.every=-1", "at least 0"]),
        ({"splits": {"heldout_ratio": 1.0}},
         ["splits.heldout_ratio=1.0", "[0, 1)"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_mistake_is_one_sentence(given: dict[str, Any], names: list[str]):
    with refused(names=names) as error:
        experiment_of(given)
    text = str(error.value).lower()
    assert not any(word in text for word in ("pydantic", "input should", "valid", "validation"))
