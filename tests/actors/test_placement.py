"""Placement: pure arithmetic over the nodes of a cluster."""

import math
import sys

import pytest
import ray

from actors.placement import Node, Placement, living_nodes, place, require_room_here, share
from rayfl.experiment.runtime import Runtime
from tests.pretended_gpu import PretendedGpu
from tests.refusals import check_sentence, line_with, refused

LAPTOP = [Node("a", 2.0, 0.0)]
PAIR = [Node("a", 8.0, 2.0), Node("b", 4.0, 0.0)]
BIG = [Node("a", 64.0, 0.0)]
HEAD = [Node("head", 0.0, 0.0)]
ZONES = [
    *HEAD,
    Node("a", 4.0, 0.0, {"zone": "west", "ray.io/market-type": "spot"}),
    Node("b", 2.0, 1.0, {"zone": "east", "ray.io/accelerator-type": "T4"}),
]


@pytest.mark.parametrize(
    ("node", "num_cpus", "num_gpus", "expected"),
    [
        (Node("a", 2.0, 0.0), 1.0, 0.0, 2),
        (Node("a", 2.0, 0.0), 0.6667, 0.0, 2),  # 2 / 0.6667 = 2.9998
        (Node("a", 2.0, 0.0), 0.6666, 0.0, 3),
        (Node("a", 8.0, 1.0), 1.0, 0.25, 4),
        (Node("a", 8.0, 1.0), 1.0, 0.3, 3),
        (Node("a", 8.0, 2.0), 1.0, 0.4, 4),  # two shares of 0.4 on each GPU; 2.0 / 0.4 would be five
        (Node("a", 8.0, 1.0), 1.0, 0.1, 8),  # the cores are what runs out
        (Node("a", 8.0, 4.0), 1.0, 1.0, 4),
        (Node("a", 0.0, 4.0), 0.5, 1.0, 0),
    ],
)
def test_how_many_actors_a_node_holds(node: Node, num_cpus: float, num_gpus: float, expected: int) -> None:
    assert node.holds(num_cpus, num_gpus) == expected


@pytest.mark.parametrize(
    ("runtime", "cluster", "expected"),
    [
        ({}, LAPTOP, (2, 1.0, 0.0)),
        ({"actors": "all"}, LAPTOP, (2, 1.0, 0.0)),
        # The rest of the cores stays for others.
        ({"actors": 1}, LAPTOP, (1, 1.0, 0.0)),
        ({"threads": 2}, LAPTOP, (1, 2.0, 0.0)),
        # Where the cores do not do, all get an even share.
        ({"actors": 3}, LAPTOP, (3, 0.6666, 0.0)),
        ({"actors": 20}, LAPTOP, (20, 0.1, 0.0)),
        ({"actors": 2, "threads": 2}, LAPTOP, (2, 1.0, 0.0)),
        ({"threads": 4}, LAPTOP, (1, 2.0, 0.0)),
        ({}, PAIR, (12, 1.0, 0.0)),
        ({"threads": 3}, PAIR, (3, 3.0, 0.0)),
        ({"actors": 5}, PAIR, (5, 1.0, 0.0)),
        # 12 cores for 5 actors are 2.4 each, of which a holds 3 and b 1; with 2 cores a holds 4 and b 2.
        ({"actors": 5, "threads": 4}, PAIR, (5, 2.0, 0.0)),
        ({"num_cpus": 3.0}, PAIR, (3, 3.0, 0.0)),
        ({"actors": 1}, BIG, (1, 1.0, 0.0)),
        # 2 GPUs hold 8 quarters, all on a, with its 8 cores.
        ({"num_gpus": 0.25}, PAIR, (8, 1.0, 0.25)),
        ({"num_gpus": 1.0}, PAIR, (2, 1.0, 1.0)),
        ({"num_gpus": 0.5, "threads": 4}, PAIR, (4, 2.0, 0.5)),
        ({"num_gpus": 0.5, "actors": 3}, PAIR, (3, 1.0, 0.5)),
    ],
)
def test_defaults_fill_the_cluster(runtime: dict, cluster: list[Node], expected: tuple[int, float, float]) -> None:
    assert place(Runtime(**runtime), cluster) == Placement(*expected)


@pytest.mark.parametrize(
    ("actors", "expected", "notice"),
    [
        (None, 10, None),
        (10, 10, None),
        ("all", 64, ["runtime.actors='all'", "10", "54 of 64"]),
        (12, 12, ["runtime.actors=12", "10", "2 of 12"]),
    ],
)
def test_there_are_as_many_actors_as_a_round_can_use(actors, expected: int, notice: list[str] | None) -> None:
    placement = place(Runtime(actors=actors), BIG, most_calls=10)
    assert (placement.num_actors, placement.num_cpus) == (expected, 1.0)
    assert len(placement.notices) == (notice is not None)
    if notice:
        check_sentence(placement.notices[0], notice)
        stacked = place(Runtime(actors=actors, engine="vmap"), BIG, most_calls=10)
        assert "runtime.stack_width" in stacked.notices[0] and "runtime.stack_width" not in placement.notices[0]


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        ({"labels": {"zone": "west"}}, 4),
        ({"labels": {"zone": "!west"}}, 2),
        # A node without a label has none of its values.
        ({"labels": {"ray.io/market-type": "!spot"}}, 2),
        ({"labels": {"zone": "in(west, east)"}}, 6),
        ({"labels": {"zone": "in(west,east)", "ray.io/market-type": "!in(spot,other)"}}, 2),
        ({"labels": {"ray.io/accelerator-type": "T4"}}, 2),
        ({"num_gpus": 0.5, "labels": {"zone": "east", "ray.io/accelerator-type": "T4"}}, 2),
    ],
)
def test_labels_choose_nodes(runtime: dict, expected: int) -> None:
    placement = place(Runtime(**runtime), ZONES)
    assert placement.num_actors == expected
    assert placement.room([Node(n.name, n.cpus, n.gpus, n.labels, n.name) for n in ZONES]) == expected


def test_the_room_of_a_cluster_is_that_of_its_nodes() -> None:
    cluster = [Node("a", 4.0, 0.0, {"zone": "west"}, "1"), Node("b", 2.0, 0.0, {}, "2"), Node("c", 0.5, 0.0, {}, "3")]
    assert Placement(1, 1.0, 0.0).room(cluster) == 6
    assert Placement(1, 1.0, 0.0).room(cluster, without={"1"}) == 2
    assert Placement(1, 1.0, 0.0, labels={"zone": "!west"}).room(cluster) == 2


@pytest.mark.parametrize(
    ("runtime", "cluster", "expected", "most", "notice"),
    [
        # A number is asked for at once; the others are as many as have room now, and grow.
        ({"actors": 20}, PAIR, (20, 1.0), 20, ["12 of 20", "num_cpus=1", "num_gpus=0"]),
        ({"actors": 20, "threads": 4}, PAIR, (20, 4.0), 20, ["3 of 20", "num_cpus=4"]),
        ({"actors": 4}, PAIR, (4, 1.0), 4, []),
        ({}, PAIR, (10, 1.0), 10, []),
        ({"actors": "all", "num_gpus": 0.25}, PAIR, (8, 1.0), sys.maxsize, []),
        # The GPUs are what decides, and the cores are shared.
        ({"actors": 30, "num_gpus": 0.5, "threads": 4}, PAIR, (30, 2.0), 30, ["4 of 30", "num_cpus=2"]),
        ({}, HEAD, (1, 1.0), 10, ["runtime.wait_for_room_s=unlimited", "1 actors", "num_cpus=1"]),
        (
            {"actors": 5, "threads": 2},
            HEAD,
            (5, 2.0),
            5,
            ["runtime.wait_for_room_s=unlimited", "5 actors", "num_cpus=2"],
        ),
        ({"num_gpus": 1, "labels": {"zone": "west"}}, HEAD, (1, 1.0), 10, ["num_gpus=1", "zone=west"]),
    ],
)
def test_a_joined_cluster_may_grow(runtime, cluster, expected, most: int, notice: list[str]) -> None:
    placement = place(Runtime(address="head:1", **runtime), cluster, most_calls=10)
    assert (placement.num_actors, placement.num_cpus, placement.most) == (*expected, most)
    if notice:
        line_with(placement.notices, notice)
    else:
        assert not placement.notices


@pytest.mark.parametrize(
    ("runtime", "cluster", "names"),
    [
        ({"num_gpus": 0.5}, LAPTOP, ["runtime.num_gpus=0.5", "a: 2 cores, 0 GPUs"]),
        ({"num_cpus": 9}, PAIR, ["runtime.num_cpus=9", "a: 8 cores"]),
        ({"num_cpus": 1, "actors": 3}, LAPTOP, ["runtime.actors=3", "holds 2", "a: 2 cores, 0 GPUs"]),
        ({"num_gpus": 0.25, "actors": 9}, PAIR, ["runtime.actors=9", "holds 8"]),
        ({"actors": 10**9}, PAIR, ["runtime.actors=1000000000", "num_cpus=0.0001"]),
        ({}, HEAD, ["head: 0 cores, 0 GPUs"]),
        (
            {"num_gpus": 1, "labels": {"zone": "west"}},
            ZONES,
            ["runtime.num_gpus=1", "zone='west'", "a: 4 cores, 0 GPUs"],
        ),
        (
            {"labels": {"zone": "north"}},
            ZONES,
            ["runtime.labels", "zone='north'", "zone=east, zone=west"],
        ),
        (
            {"labels": {"rack": "7"}},
            ZONES,
            ["runtime.labels", "rack='7'", "ray.io/accelerator-type=T4, ray.io/market-type=spot, zone=east"],
        ),
        (
            {"labels": {"zone": "east", "ray.io/market-type": "spot"}},
            ZONES,
            ["runtime.labels", "zone='east', ray.io/market-type='spot'", "ray.io/market-type=spot"],
        ),
        ({"labels": {"zone": "a"}}, LAPTOP, ["runtime.labels", "zone='a'", "no labels"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(runtime: dict, cluster: list[Node], names: list[str]) -> None:
    with refused(names=names):
        place(Runtime(**runtime), cluster)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_the_nodes_of_a_running_cluster() -> None:
    (node,) = living_nodes()
    assert node == Node(ray.util.get_node_ip_address(), 4.0, 1.0, node.labels, node.labels["ray.io/node-id"])
    with refused(names=["num_gpus=0.25", "holds 4"]):
        place(Runtime(actors=5, num_gpus=0.25))


@pytest.mark.parametrize(
    ("runtime", "cluster", "parallel", "expected"),
    [
        # Two cores for two runs: an actor of one core each; for three: an actor each, of which three fit.
        ({}, LAPTOP, 2, (1, 1.0)),
        ({}, LAPTOP, 3, (1, 0.6666)),
        ({"actors": 4}, LAPTOP, 2, (4, 0.25)),
        # 64 actors have room, and each of the two runs can use 20.
        ({}, BIG, 2, (20, 1.0)),
        ({"actors": "all"}, BIG, 2, (32, 1.0)),
        ({}, PAIR, 3, (4, 1.0)),
        # Shares of 0.25 of two GPUs are eight actors, and two runs have four each.
        ({"num_gpus": 0.25}, PAIR, 2, (4, 1.0)),
    ],
)
def test_runs_at_once_share_the_cluster(runtime, cluster, parallel, expected) -> None:
    shared = share(Runtime(**runtime), parallel, 20, cluster)
    assert (shared.actors, pytest.approx(shared.num_cpus)) == expected
    # What all runs ask for together fits.
    together = shared.model_copy(update={"actors": expected[0] * parallel})
    assert place(together, cluster).num_actors == expected[0] * parallel


def test_a_run_by_itself_keeps_what_it_asks_for() -> None:
    assert share(Runtime(), 1, nodes=LAPTOP) == Runtime()
    with refused(names=["head: 0 cores"]):
        share(Runtime(), 1, nodes=HEAD)
    # Two runs on a cluster that has no workers yet ask for one actor each.
    assert share(Runtime(address="head:1"), 2, nodes=HEAD).actors == 1


def test_runs_that_do_not_fit_beside_each_other_are_refused() -> None:
    with refused(names=["holds 8", "--parallel 3", "4 actors"]):
        share(Runtime(actors=4, num_gpus=0.25), 3, nodes=PAIR)


def test_the_wait_for_room_is_for_joined_clusters() -> None:
    joined = place(Runtime(address="head:1", wait_for_room_s=90), PAIR)
    assert joined.patience == ("runtime.wait_for_room_s", 90.0)
    assert place(Runtime(address="head:1"), PAIR).patience == ("runtime.wait_for_room_s", math.inf)
    assert place(Runtime(wait_for_room_s="unlimited"), PAIR).patience == ("runtime.start_timeout_s", 120.0)
    with refused(names=["runtime.wait_for_room_s=90", "runtime.address", "'unlimited'", "runtime.start_timeout_s"]):
        place(Runtime(wait_for_room_s=90), PAIR)
    # What no node can ever hold is refused, and not waited for.
    with refused(names=["runtime.num_cpus=9", "a: 8 cores"]):
        place(Runtime(address="head:1", num_cpus=9), PAIR)


def test_what_this_machine_cannot_hold_is_refused_before_a_local_ray_starts() -> None:
    with PretendedGpu():
        require_room_here(Runtime(num_gpus=0.5))
        with refused(names=["num_gpus=0.5", "this machine: ", "1 GPUs", "holds 2"]):
            require_room_here(Runtime(num_gpus=0.5, num_cpus=0.01, actors=3))
    with refused(names=["runtime.actors=1000000000", "this machine: ", "cores"]):
        require_room_here(Runtime(actors=10**9))
