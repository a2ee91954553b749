"""What Prometheus finds at a node while a run is played."""

import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import ray

import rayfl
from rayfl.run_directory.record import read_run
from tests.actors.toys import experiment

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "ray_rayfl_rounds_total",
    "ray_rayfl_uplink_bytes_total",
    "ray_rayfl_downlink_bytes_total",
    "ray_rayfl_delivered_clients",
    "ray_rayfl_round_seconds",
    "ray_rayfl_checkpoint_seconds",
    "ray_rayfl_client_actors",
    "ray_rayfl_mean",
}


def test_the_board_draws_what_there_is() -> None:
    board = json.loads((ROOT / "k8s" / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    drawn = {name for expression in expressions for name in re.findall("ray_rayfl_[a-z_]+", expression)}
    assert drawn == {*NAMES, "ray_rayfl_losses_total"}
    assert all('run=~"$run"' in expression for expression in expressions)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_run_is_found_at_rays_endpoint_of_metrics(tmp_path: Path) -> None:
    given = {"output": {"report": False}, "checkpoint": {"every": 1}}
    table: dict[str, Any] = experiment(rounds=10_000, runtime={"actors": 1}).as_dict() | given
    until, found = time.monotonic() + 120, dict[str, dict[str, float]]()

    def look(one: Any) -> bool:
        if one.round % 50 == 0:
            found.update(values("a run"))
        return set(found) >= NAMES or time.monotonic() > until

    rayfl.run(directory=tmp_path / "a run", progress=False, on_round=look, **table)
    assert set(found) >= NAMES, "after two minutes of a run that sends its values every ten seconds"
    assert found["ray_rayfl_client_actors"] == {"": 1.0}
    rounds, downlink = found["ray_rayfl_rounds_total"][""], found["ray_rayfl_downlink_bytes_total"][""]
    recorded = read_run(tmp_path / "a run").rounds.to_pandas()
    assert 0 < rounds <= len(recorded)
    # The two counters may have been read in the middle of a round.
    bytes_by_round = (recorded["downlink_bits"] / 8).cumsum()
    assert downlink in set(bytes_by_round[max(0, int(rounds) - 2) : int(rounds) + 1])
    assert 0.0 <= found["ray_rayfl_mean"]["own/accuracy"] <= 1.0


def values(run: str) -> dict[str, dict[str, float]]:
    """rayfl's metrics of a run at this node: by name, and by the label that is not the run's ("" without one)."""
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    with urllib.request.urlopen(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if match := re.fullmatch(r"(ray_rayfl_\w+)\{(.*)\} (\S+)", line):
            labels = dict(re.findall(r'(\w+)="(.*?)"', match[2]))
            if labels["run"] == run:
                label = labels.get("metric", labels.get("cause", ""))
                found.setdefault(match[1], {})[label] = float(match[3])
    return found
