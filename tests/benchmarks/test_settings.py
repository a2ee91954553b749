"""`python -m benchmarks settings`: pairs of method and setting that change a run, are refused, or do nothing."""

import json
from pathlib import Path

from benchmarks.settings import CHANGED, REFUSED, SILENT, pairs, values
from rayfl.methods.peers.dpsgd import DPSGD
from rayfl.methods.server.fedopt import FedOpt
from tests.benchmarks.commands import benchmark
from tests.refusals import refused


def test_a_setting_changes_a_run_or_is_refused():
    found = {}
    for setting, value, verdict, words in pairs("local"):
        found[setting] = value, verdict, words
        if setting == "clients.fraction":
            break
    assert found["seed"][:2] == (2, CHANGED) and found["model.hidden"][1] == CHANGED
    assert found["clients.per_round"][:2] == (3, REFUSED) and "clients.per_round=3" in found["clients.per_round"][2]


def test_values_differ_from_the_plain_runs():
    fields = {**DPSGD.Hyper.model_fields, **FedOpt.Hyper.model_fields}
    assert values(fields["order"], None) == ["lian"]
    assert values(fields["server_optimizer"], "yogi") == ["adagrad", "adam"]
    assert 3 in values(fields["epochs"], None) and 32 not in values(fields["batch_size"], None)
    assert 0.99 not in values(fields["beta2"], None) and all(
        isinstance(one, float) for one in values(fields["lr"], None)
    )


def test_methods_in_the_file_are_not_tried_again(tmp_path: Path):
    path = tmp_path / "found.json"
    row = {"method": "fedavg", "setting": "seed", "value": 2, "found": SILENT, "words": ""}
    path.write_text(json.dumps({"written_by": "python -m benchmarks settings", "pairs": [row]}, indent=2))
    result = benchmark("settings", "fedavg", "--json", path)
    assert result.exit_code == 1 and "1 pairs of 1 methods: 0 changed, 0 refused, 1 silent" in result.output
    refused(benchmark("settings", "fedavgg", "--json", path), names=["'fedavgg'", "fedavg"])
