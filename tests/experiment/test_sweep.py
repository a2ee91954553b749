"""The `[sweep]` table: which combinations it gives, what they are called, and what a mistake in it gets."""

from pathlib import Path

import pytest

from rayfl.compress.dense import Dense
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sparse import TopK
from rayfl.experiment.experiment import read
from rayfl.experiment.identity import determining_settings
from rayfl.experiment.sweep import Combination, directory_name, read_sweep
from tests.refusals import refused

BASE = """
name = "base"
rounds = 2
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 4}
method = {name = "fedavg", lr = 0.1, steps = 3}
"""


def swept(tmp_path: Path, sweep: str, *overrides: str) -> list[Combination]:
    file = tmp_path / "base.toml"
    file.write_text(f"{BASE}\n[sweep]\n{sweep}\n")
    found = read_sweep(file, overrides)
    assert found is not None
    return found


def hyper(one: Combination) -> dict:
    return one.experiment.method.hyper.model_dump()


def test_a_file_without_the_table_is_no_sweep_and_an_override_makes_it_one(tmp_path):
    file = tmp_path / "base.toml"
    file.write_text(BASE)
    assert read_sweep(file) is None
    found = read_sweep(file, ["sweep.seed=[3, 4]"])
    assert found is not None and [one.experiment.seed for one in found] == [3, 4]


def test_the_cross_product_comes_in_order_the_last_key_changing_fastest(tmp_path):
    found = swept(tmp_path, 'seed = [2, 1]\n"method.lr" = [0.1, 0.01]')
    assert [(one.experiment.seed, hyper(one)["lr"]) for one in found] == [(2, 0.1), (2, 0.01), (1, 0.1), (1, 0.01)]
    # What is not swept stays as the file has it.
    assert all(hyper(one)["steps"] == 3 and one.experiment.name == "base" for one in found)
    assert [one.title for one in found] == ["seed=2, lr=0.1", "seed=2, lr=0.01", "seed=1, lr=0.1", "seed=1, lr=0.01"]
    assert [one.directory for one in found] == ["seed=2,lr=0.1", "seed=2,lr=0.01", "seed=1,lr=0.1", "seed=1,lr=0.01"]
    # Seeds of one setting share a legend.
    assert [one.experiment.label for one in found] == ["lr=0.1", "lr=0.01"] * 2


def test_a_table_never_replaces_a_setting_of_it_that_is_swept_beside_it(tmp_path):
    # TOML lets cases only come after the other lists.
    sweep = '"method.lr" = [0.2, 0.3]\n[[sweep.case]]\nlabel = "A"\nmethod = {name = "fedavg", lr = 0.1, steps = 5}'
    for one in (sweep, '"method.lr" = [0.2, 0.3]\nmethod = [{name = "fedavg", steps = 5}]'):
        found = [hyper(one) for one in swept(tmp_path, one)]
        assert [(one["lr"], one["steps"]) for one in found] == [(0.2, 5), (0.3, 5)]


def test_dotted_keys_need_no_quotes(tmp_path):
    quoted, bare = swept(tmp_path, '"method.lr" = [1.0, 2.0]'), swept(tmp_path, "method.lr = [1.0, 2.0]")
    assert quoted == bare


def test_items_may_be_tables_with_labels(tmp_path):
    found = swept(
        tmp_path,
        """uplink = ["dense", {name = "dense", dtype = "fp16", label = "half"}, {name = "topk", keep_ratio = 0.1},
           {name = "feedback", inner = {name = "topk", keep_ratio = 0.2}}]""",
    )
    feedback = ErrorFeedback(inner=TopK(keep_ratio=0.2))
    assert [one.experiment.uplink for one in found] == [Dense(), Dense(dtype="fp16"), TopK(keep_ratio=0.1), feedback]
    labels = ["dense", "half", "topk(keep_ratio=0.1)", "feedback(topk(keep_ratio=0.2))"]
    assert [one.experiment.label for one in found] == labels == [one.title for one in found]
    assert [one.directory for one in found] == ["dense", "half", "topk-keep_ratio=0.1", "feedback-topk-keep_ratio=0.2"]


def test_each_run_records_its_items_by_which_tables_place_it(tmp_path):
    sweep = 'seed = [1]\nmethod.lr = [0.1]\nuplink = ["dense", {name = "topk", label = "few"}, {name = "topk"}]\n'
    found = swept(tmp_path, sweep + '[[sweep.case]]\nlabel = "two"\nclients.count = 2')
    assert [one.experiment.swept for one in found] == [
        {"method.lr": "0.1", "uplink": uplink, "case": "two"} for uplink in ("dense", "few", "topk")
    ]
    first = found[0].experiment.as_dict()
    assert determining_settings(first) == determining_settings({**first, "swept": {}})


def test_two_keys_with_names_are_told_apart(tmp_path):
    found = swept(tmp_path, 'uplink = ["dense", "topk"]\ndownlink = ["dense", "topk"]')
    assert [one.title for one in found][1:3] == ["uplink=dense, downlink=topk", "uplink=topk, downlink=dense"]


def test_keys_that_end_alike_are_said_in_full(tmp_path):
    found = swept(tmp_path, "clients.count = [4, 5]\nclients.per_round = [1]\nseed = [1]")
    assert [one.title for one in found] == ["count=4, per_round=1, seed=1", "count=5, per_round=1, seed=1"]
    sweep = 'uplink = [{name = "topk", label = "u"}]\n"uplink.keep_ratio" = [0.1]\nmethod.lr = [1.0]\n'
    (one,) = swept(tmp_path, sweep + 'downlink.name = ["topk"]\n"downlink.keep_ratio" = [0.3]')
    assert one.title == "u, uplink.keep_ratio=0.1, lr=1.0, name=topk, downlink.keep_ratio=0.3"
    assert (one.experiment.uplink, one.experiment.downlink) == (TopK(keep_ratio=0.1), TopK(keep_ratio=0.3))


def test_values_may_be_lists(tmp_path):
    found = swept(tmp_path, 'model.name = ["mlp"]\nmodel.hidden = [[8], [8, 4]]')
    assert [one.directory for one in found] == ["mlp,hidden=8", "mlp,hidden=8,4"]


def test_overrides_pin_change_and_reach_into_the_sweep(tmp_path):
    sweep = 'seed = [0, 1]\nuplink = [{name = "topk", keep_ratio = 0.1}, {name = "stc", keep_ratio = 0.1}]'
    assert [one.title for one in swept(tmp_path, sweep, "uplink=dense")] == ["seed=0", "seed=1"]
    assert [one.experiment.label for one in swept(tmp_path, sweep, "uplink=dense")] == [None, None]
    pinned = swept(tmp_path, sweep, "uplink=dense", "seed=7")
    assert [(one.title, one.experiment.seed, one.experiment.uplink) for one in pinned] == [("base", 7, Dense())]
    changed = swept(tmp_path, sweep, 'sweep.uplink=["dense"]', "method.lr=0.5")
    assert [(one.title, hyper(one)["lr"]) for one in changed] == [("seed=0, dense", 0.5), ("seed=1, dense", 0.5)]
    inside = swept(tmp_path, sweep, "uplink.keep_ratio=0.3", "seed=1")
    assert [one.experiment.uplink.model_dump()["keep_ratio"] for one in inside] == [0.3, 0.3]


def test_an_override_sweeps_a_part_of_what_is_swept(tmp_path):
    found = swept(tmp_path, 'method = ["fedavg", "local"]\n"method.lr" = [1.0, 2.0]', "sweep.method.lr=[0.1]")
    assert [one.title for one in found] == ["fedavg, lr=0.1", "local, lr=0.1"]


CASES = """
seed = [1, 2]
[[sweep.case]]
label = "compressed"
method = {name = "dcgd", lr = 0.3}
uplink = "topk"
[[sweep.case]]
label = "two clients"
clients.per_round = 2
"""


def test_a_case_changes_settings_of_several_tables(tmp_path):
    found = swept(tmp_path, CASES)
    assert [one.title for one in found[:2]] == ["seed=1, compressed", "seed=1, two clients"]
    one, other = (one.experiment for one in found[2:])
    assert (one.method.name, one.uplink.name, one.clients.per_round, one.seed) == ("dcgd", "topk", None, 2)
    # What a case does not name stays as the file has it, in the same table too.
    assert (other.method.name, other.uplink.name, other.clients.per_round, other.clients.count) == (
        "fedavg",
        "dense",
        2,
        4,
    )
    # An override inside what a case replaces holds in every case.
    assert [hyper(one)["lr"] for one in swept(tmp_path, CASES, "method.lr=0.7")] == [0.7] * 4


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("clients.per_round = 2", ["sweep.case", "label"]),
        ('label = "a"\nclients.per_rond = 2', ["a", "clients.per_rond"]),
        ('label = "a"\nuplink = "topk"\nmethod = {name = "fedpse"}', ["a", "uplink"]),
    ],
)
def test_a_wrong_case_gets_one_sentence(tmp_path, case, names):
    with refused(names=names):
        swept(tmp_path, f"[[sweep.case]]\n{case}")


def test_the_experiment_that_a_sweep_varies_can_be_read_alone(tmp_path):
    swept(tmp_path, "seed = [5, 6]")
    assert read(tmp_path / "base.toml").seed == 1


@pytest.mark.parametrize(
    ("sweep", "names"),
    [
        ("seed = 3", ["sweep.seed=3", "a list"]),
        ("method.lr = []", ["sweep.method.lr=[]", "at least one value"]),
        ("seed = [1, 1]", ["two combinations", "seed=1", "label"]),
        ('uplink = [{name = "topk", label = 3}]', ["sweep.uplink", "label 3", "text"]),
        ("seed = [0]\nmethod.lr = [0.1, -1]", ["seed=0, lr=-1", "method.lr=-1", "greater than 0"]),
        ("method.lrr = [0.1]", ["lrr=0.1", "method.lrr", "'lr'"]),
        ('uplink = ["topkk"]', ["topkk", "topk"]),
        ("rounds.x = [1]", ["x=1", "rounds.x", "rounds is 2"]),
        (
            'uplink = [{name = "topk", label = "a b"}, {name = "dense", label = "a;b"}]',
            ["two combinations", "'a-b'", "label"],
        ),
    ],
)
def test_a_mistake_gets_one_sentence_that_names_the_combination(tmp_path, sweep, names):
    with refused(names=names):
        swept(tmp_path, sweep)


def test_a_sweep_is_a_table(tmp_path):
    file = tmp_path / "base.toml"
    file.write_text(f"sweep = [1]\n{BASE}")
    with refused(names=["sweep=[1]", "table", "lists"]):
        read_sweep(file)


def test_directories_are_names_that_shells_and_file_systems_take():
    assert directory_name("top-k 10 %, seed=1") == "top-k-10,seed=1"
    assert directory_name("../..//x") == "x"
    # A title of no such letter, and a long one, end in the first digits of its SHA-256.
    assert len(directory_name("%")) == 8
    long = directory_name("x" * 300)
    assert len(long) == 120 and long != directory_name("x" * 301)


@pytest.mark.parametrize(
    "table", ["[sweep]\nmethod = ['mine.py:Mine', 'fedavg']", "[[sweep.case]]\nlabel = 'a'\nmethod = 'mine.py:Mine'"]
)
def test_paths_start_at_the_folder_of_the_file(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.py").write_text(
        "from rayfl.methods.server.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    paper = 'None'\n"
    )
    text = (
        "rounds = 1\ndata = 'digits'\npartition = 'iid'\nclients = {count = 2}\nmodel = 'logistic'\nmethod = 'fedavg'\n"
    )
    (tmp_path / "there" / "swept.toml").write_text(text + table)
    monkeypatch.chdir(tmp_path)
    combinations = read_sweep(Path("there/swept.toml"))
    assert combinations is not None and combinations[0].experiment.method.kind.__name__ == "Mine"
