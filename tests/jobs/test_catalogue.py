"""The lists of what there is: every setting is explained, and every example is one that an experiment takes."""

import pytest

from jobs.catalogue import example, in_table
from jobs.display import first_sentence
from rayfl.choices.kinds import known, named
from rayfl.experiment.experiment import LISTED, Experiment
from rayfl.experiment.unknown_keys import settings_of
from tests.jobs.commands import rayfl
from tests.refusals import refused
from tests.small_cases import small_cases

BASE = {
    "rounds": 1,
    "data": "digits",
    "partition": "iid",
    "clients": {"count": 4},
    "model": "mlp",
    "method": {"name": "fedavg"},
}
ALL = [(table, name) for table, kind in LISTED.items() for name in named(kind)]


@small_cases("table, name", ALL)
def test_an_example_is_a_table_that_an_experiment_takes(table: str, name: str):
    given = example(name, known(LISTED[table])[name])
    base = {**BASE, "method": {"name": "dpsgd"}} if table == "topology" else BASE
    tables = in_table(table, given)
    whole = Experiment(**{**base, **tables})
    found = whole.evaluation.metrics if "." in table else getattr(whole, table)
    chosen = found[0] if isinstance(found, tuple) else found
    assert chosen is not None and name in chosen.name


@small_cases("table, name", ALL)
def test_every_setting_is_explained(table: str, name: str):
    fields = settings_of(known(LISTED[table])[name])
    assert [key for key, field in fields.items() if not field.description] == []


def test_a_sentence_ends_at_its_full_stop():
    assert first_sentence("One, two, ...\n  and n of them. Another sentence.") == "One, two, ... and n of them."
    assert first_sentence("Only one, without its full stop") == "Only one, without its full stop."
    assert first_sentence("") == ""


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        ("methods", "fedpse", ["McMahan", "keep_ratio", "peers"]),
        ("models", "mlp", ["resnet18", "hidden = [200]"]),
        ("tasks", "classification", ["One class of several"]),
        ("datasets", "digits", ["fashion-mnist", "360 test images"]),
        ("partitions", "dirichlet-client", ["lambda-ratio", "alpha = 0.3"]),
        ("compressors", "topk", ["keep_ratio = 0.1", "natural"]),
        ("metrics", "top-k", ["auroc", "bins = 4096", "confusion"]),
        ("topologies", "ring", ["erdos-renyi", "p = 0.5"]),
    ],
)
def test_each_list_has_all_and_one_page_a_name(command: str, name: str, words: list[str]):
    listed = rayfl(command)
    assert listed.exit_code == 0, listed.output
    assert [word for word in [*words, name] if word not in listed.output] == []
    one = rayfl(command, name)
    assert one.exit_code == 0 and f'name = "{name}"' in one.output
    refused(rayfl(command, name[:-1]), names=[name[:-1], repr(name)])
