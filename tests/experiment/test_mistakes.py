"""Every mistake in an experiment is one plain sentence with the full path of the key."""

from typing import Any

import pytest

from rayfl.errors import RayflError
from tests.experiment.test_experiment import experiment_of

FEDAVG = {"method": "fedavg"}
INNER = {"name": "topk", "keep_ratio": 2.0}
UNION = (
    "a number, a list of numbers, a table with median and sigma, a table with low and high or a table with groups and "
    "order"
)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"ronds": 3}, "unknown key 'ronds': did you mean 'rounds'?"),
        ({"method": {"name": "fedpse", "keep_rato": 1}}, "unknown key 'method.keep_rato': did you mean 'keep_ratio'?"),
        ({"runtime": {"actrs": 3}}, "unknown key 'runtime.actrs': did you mean 'actors'?"),
        ({"data": {"name": "synthetic", "dims": 3}}, "unknown key 'data.dims': did you mean 'dim'?"),
        ({"method": {"name": "fedavg", "learning_rate": 1}}, "unknown key 'method.learning_rate': did you mean 'lr'?"),
        ({"method": {"name": "fedavg", "Local-Epochs": 1}},
         "unknown key 'method.Local-Epochs': did you mean 'epochs'?"),
        ({"batchsize": 1}, "unknown key 'batchsize': did you mean 'method.batch_size'?"),
        ({"clients": {"num_clients": 5}}, "unknown key 'clients.num_clients': did you mean 'count'?"),
        ({"num_clients": 5}, "unknown key 'num_clients': did you mean 'clients.count'?"),
        ({"lr": 0.1}, "unknown key 'lr': did you mean 'method.lr'?"),
        (
            {"runtime": {"actors": "most"}},
            "runtime.actors='most' is not allowed; it must be a whole number of at least 1 or 'all', or be left out",
        ),
        ({"runtime": {"labels": {"zone": 3}}},
         "runtime.labels={'zone': 3} is not allowed; it must be a table of texts, or be left out"),
        (
            {"runtime": {"labels": {"zone": "a,b"}}},
            "runtime.labels has 'zone' = 'a,b', which selects no nodes; give a label's key, and its value as 'spot', "
            "'!spot', 'in(a, b)' or '!in(a, b)'",
        ),
        (
            {"runtime": {"labels": {"ray.io/node-id": "0a"}}},
            "runtime.labels has ray.io/node-id, which every start of a node makes anew; choose by another label",
        ),
        (
            {"runtime": {"accelerator_type": "A 100"}},
            "runtime.accelerator_type='A 100' is no name that Ray has for one",
        ),
        (
            {"runtime": {"accelerator_type": "A100", "labels": {"ray.io/accelerator-type": "T4"}}},
            "runtime.accelerator_type is the label ray.io/accelerator-type, which labels has too; give one of them",
        ),
        ({"runtime": {"seed": 3}}, "unknown key 'runtime.seed': did you mean 'seed'"),
        ({"learning_rat": 0.1}, "unknown key 'learning_rat': known are: "),
        ({"method": {"name": "fedavg", "keep_ratio": 0.1, "lr": 0.1}},
         "unknown key 'method.keep_ratio': method 'fedavg' does not take it, but 'fedpse', 'fedscr' and 'fedstc' do"),
        ({"partition": {"name": "iid", "ratio": 0.1}},
         "unknown key 'partition.ratio': partition 'iid' does not take it, but 'lambda-ratio' does; remove it, or "
         "give partition=iid, which replaces the whole table, in place of partition.name=iid"),
        ({"method": "fedspe"}, "unknown method 'fedspe': did you mean 'fedpse'?"),
        ({"data": "digit"}, "unknown dataset 'digit': did you mean 'digits'?"),
        ({"model": "convnet"}, "unknown model 'convnet': did you mean 'convnet2'?"),
        ({"partition": "dirichlett"}, "unknown partition 'dirichlett': did you mean 'dirichlet"),
        (FEDAVG | {"uplink": "topkk"}, "unknown compressor 'topkk': did you mean 'topk'?"),
        (FEDAVG | {"uplink": {"name": "feedback", "inner": {"name": "top"}}}, "unknown compressor 'top': did you mean"),
        ({"topology": "rnig"}, "unknown topology 'rnig': did you mean 'ring'?"),
        ({"method": {"name": ["x"]}}, "unknown method ['x']: known are: "),
        ({"method": {"lr": 0.1}}, "method.name is missing; a method is one of "),
        ({"model": {}}, "model.name is missing; a model is one of alexnet-mcepl, "),
        ({"method": 5}, "method=5 is not allowed; it must be a name, or a table with a name"),
        ({"uplink": [1]}, "uplink=[1] is not allowed; it must be a name, or a table with a name"),
        ({"rounds": "5"}, "rounds='5' is not allowed; it must be a whole number of at least 1"),
        ({"rounds": 0}, "rounds=0 is not allowed; it must be a whole number of at least 1"),
        ({"seed": -1}, "seed=-1 is not allowed; it must be a whole number of at least 0"),
        ({"clients": 3}, "clients=3 is not allowed; it must be a table"),
        ({"clients": {}}, "clients.count is missing"),
        ({"name": "a/b"}, "name='a/b' is not allowed; use letters, digits, '.', '_' and '-', and begin with a letter"),
        ({"name": ""}, "name='' is not allowed; use letters"),
        ({"method": {"name": "fedpse", "keep_ratio": 2.0}},
         "method.keep_ratio=2.0 is not allowed; it must be a number in (0, 1]"),
        ({"method": {"name": "fedpse", "keep_ratio": 0}},
         "method.keep_ratio=0 is not allowed; it must be a number in (0, 1]"),
        ({"method": {"name": "fedpse", "lr": float("nan")}},
         "method.lr=nan is not allowed; it must be a number greater than 0"),
        ({"method": {"name": "fedpse", "downstream": "topk"}},
         "method.downstream='topk' is not allowed; it must be 'dps' or 'broadcast_topk'"),
        ({"method": {"name": "fedavg", "epochs": 1, "steps": 2}},
         "method.epochs=1 and steps=2 are both given; give one of them"),
        ({"method": {"name": "fedavg", "optimizer": "adam", "momentum": 0.9}},
         "method.momentum=0.9 belongs to optimizer='sgd' or 'nesterov', not 'adam'"),
        ({"partition": {"name": "lambda-ratio", "ratio": 1.5}},
         "partition.ratio=1.5 is not allowed; it must be a number in [0, 1]"),
        (FEDAVG | {"uplink": {"name": "topk", "keep_ratio": 0.0}}, "uplink.keep_ratio=0.0 is outside (0, 1]"),
        (FEDAVG | {"uplink": {"name": "feedback", "inner": INNER}}, "uplink.inner.keep_ratio=2.0 is outside (0, 1]"),
        (FEDAVG | {"downlink": "feedback"}, "downlink 'feedback' has no memory to feed back; give its inner"),
        ({"uplink": "topk"}, "fedpse fixes what it sends; remove the [uplink] table"),
        ({"clients": {"count": 20, "per_round": 30}},
         "clients.per_round=30 is more than the 20 clients there are; lower per_round or raise count"),
        ({"clients": {"count": 20, "per_round": 2.5}},
         "clients.per_round=2.5 is not allowed; it must be a whole number of at least 1, or be left out"),
        ({"clients": {"count": 20, "per_round": 3, "fraction": 0.1}},
         "clients.per_round=3 and fraction=0.1 are both given; give one"),
        ({"clients": {"count": 20, "fraction": 1.5}},
         "clients.fraction=1.5 is not allowed; it must be a number in (0, 1], or be left out"),
        ({"clients": {"count": 20, "retention_ratio": "x"}},
         f"clients.retention_ratio='x' is not allowed; it must be {UNION}, or be left out"),
        ({"clients": {"count": 20, "retention_ratio": {"groups": [0.5, 1.5]}}},
         "clients.retention_ratio=1.5 is not allowed; it must be in (0, 1]"),
        ({"clients": {"count": 20, "retention_ratio": {"groups": []}}},
         "clients.retention_ratio.groups=[] is not allowed; it must be a list of numbers"),
        ({"clients": {"count": 20, "retention_ratio": 1.5}},
         "clients.retention_ratio=1.5 is not allowed; it must be in (0, 1]"),
        ({"clients": {"count": 20, "retention_ratio": {"low": 0.5, "high": 1.5}}},
         "clients.retention_ratio has low=0.5 and high=1.5; low must be below high, both in (0, 1]"),
        ({"clients": {"count": 20, "retention_ratio": {"median": 0.5, "sigma": 1.5}}},
         "clients.retention_ratio must be in (0, 1], which a log-normal draw need not be; give low and high instead"),
        ({"clients": {"count": 20, "uplink_mbps": [1, -2]}},
         "clients.uplink_mbps=-2.0 is not allowed; it must be in [1e-09, 1e+12]"),
        ({"clients": {"count": 20, "uplink_mbps": []}}, "clients.uplink_mbps=[] has no values; give at least one"),
        ({"model": {"name": "mlp", "hidden": [10, 0]}},
         "model.hidden=[10, 0] is not allowed; it must be a list of whole numbers of at least 1"),
        ({"evaluation": {"every": -1}}, "evaluation.every=-1 is not allowed; it must be a whole number of at least 0"),
        ({"splits": {"heldout_ratio": 1.0}},
         "splits.heldout_ratio=1.0 is not allowed; it must be a number in [0, 1), or be left out"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_mistake_is_one_sentence(given: dict[str, Any], sentence: str):
    with pytest.raises(RayflError) as error:
        experiment_of(given)
    text = str(error.value)
    assert text.startswith(sentence)
    assert "\n" not in text
    assert not any(word in text.lower() for word in ("pydantic", "input should", "valid", "validation"))
