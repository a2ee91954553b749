"""Drawings of peers' graphs, from runs whose records are written by hand."""

import numpy as np
import pytest

from rayfl.report.graph_figures import MOST_PEERS, graph_section
from rayfl.report.groups import group_runs
from rayfl.rounds.ledger import ClientRow, MetricRow, RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.record import Recorder, Run, read_run
from rayfl.run_directory.run_folder import create_run_directory

NAME = "own/accuracy"


@pytest.fixture
def run(tmp_path):
    """A function that makes a run of two rounds, in which peer i sends 8000 (i + 1) bits a round and has the accuracy
    i / 10."""

    def made(topology: object, num_peers: int = 4, name: str = "run") -> Run:
        directory = create_run_directory(tmp_path / name)
        (directory / "links.csv").write_text("1 0\n2 0\n3 1\n0 3\n3 0\n")
        Description({"name": name, "seed": 1, "topology": topology}).write(directory, {})
        with Recorder(directory) as recorder:
            for round_number in range(2):
                clients = [ClientRow(peer, "delivered", 8000 * (peer + 1), 0, 1, 1, 1.0) for peer in range(num_peers)]
                metrics = [MetricRow(None, "graph/mean_degree", 2.0), MetricRow(None, "graph/spectral_gap", 0.125)]
                metrics += [MetricRow(peer, NAME, peer / 10) for peer in range(min(num_peers, 10))]
                row = RoundRow(round_number, num_peers, num_peers, 8000, 8000, 1.0, 1.0)
                recorder.round(row, clients, metrics)
        return read_run(directory)

    return made


def links(figure) -> dict[str, dict]:
    return {row["from"]: row for row in figure.chart["layer"][0]["data"]["values"]}


def test_a_link_is_as_wide_as_its_share_of_the_senders_bytes_and_has_a_tip_at_the_receiver(run):
    # Peer 0 is heard by 1, 2 and 3: in two rounds 2000 bytes, a third each. 0 hears 3 too, whose 8000 it has alone.
    (figure,) = graph_section(
        group_runs([run({"name": "file", "path": "links.csv", "directed": True})]), [NAME]
    ).figures
    drawn = links(figure)
    assert {name: row["one_way"] for name, row in drawn.items()} == {
        **dict.fromkeys(("0 to 1", "0 to 2", "1 to 3"), True),
        "3 and 0": False,
    }
    assert [drawn[name]["bytes"] for name in ("0 to 1", "1 to 3")] == pytest.approx([2000 / 3, 4000], rel=1e-4)
    assert drawn["3 and 0"]["bytes"] == pytest.approx(2000 / 3 + 8000, rel=1e-4)
    peers = figure.chart["layer"][1]["data"]["values"]
    places = np.array([[peer["x"], peer["y"]] for peer in peers])
    ends = np.array([drawn["1 to 3"][field] for field in ("x2", "y2")])
    assert np.linalg.norm(ends - places[3]) < 0.2 < np.linalg.norm(ends - places[1])
    assert [peer["value"] for peer in peers] == [0.0, 0.1, 0.2, 0.3]
    assert (peers[0]["hears"], peers[0]["heard"]) == (1, 3)
    assert all(words in figure.caption for words in ("0.125", "15.0 %", "tip", "4 peers"))


def test_a_graph_that_changes_is_that_of_its_last_round(run):
    varying = run({"name": "one-peer-exponential"}, 4, "varying")
    (figure,) = graph_section(group_runs([varying]), [NAME]).figures
    # Neighbours at distance 1 in round 0, and at distance 2 in round 1, in which peer 0 sends 1000 bytes and 2 3000.
    assert links(figure).keys() == {"2 and 0", "3 and 1"} and "from round to round" in figure.caption
    assert links(figure)["2 and 0"]["bytes"] == 4000
    # With three peers i hears i + 1 in round 0 and i + 2 in round 1.
    (figure,) = graph_section(group_runs([run({"name": "one-peer-exponential"}, 3, "three")]), [NAME]).figures
    assert {name: row["one_way"] for name, row in links(figure).items()} == dict.fromkeys(
        ("2 to 0", "0 to 1", "1 to 2"), True
    )


@pytest.mark.parametrize(
    ("topology", "num_peers", "words"),
    [
        ({"name": "ring"}, MOST_PEERS + 1, "too many"),
        ({"name": "links.csv:Mine"}, 4, "no code"),
        ({"name": "matcha", "base": {"name": "links.csv:Mine"}}, 4, "no code"),
    ],
)
def test_what_is_not_drawn_says_why(run, topology, num_peers, words):
    (figure,) = graph_section(group_runs([run(topology, num_peers)]), [NAME]).figures
    assert not figure.chart and words in figure.caption


def test_a_page_has_each_graph_once_and_none_that_cannot_be_read(run):
    runs = [run({"name": name}, name=name) for name in ("ring", "torus", "fully-connected")]
    again = run({"name": "ring"}, name="again")
    lost = run({"name": "file", "path": "missing.csv"}, name="lost")
    figures = graph_section(group_runs([*runs, again, lost]), [NAME]).figures
    assert [figure.title for figure in figures] == ["ring", "torus", "fully-connected"]
