"""Which machines may compute a run together; no Ray needed."""

import pytest

from actors.placement import Machines, Verdict
from rayfl.determinism.platform import DECISIVE, describe
from tests.refusals import check_sentence

HERE = {key: f"our {key}" for key in DECISIVE} | {"cores": 8}
ODD = HERE | {"cpu": "another cpu", "gpu": "another gpu"}
UNLIKE = ("cpu=our cpu", "cpu=another cpu", "gpu=our gpu", "gpu=another gpu")


@pytest.mark.parametrize("found", [[HERE, ODD, HERE], [ODD, HERE, HERE], [HERE, HERE, ODD]])
def test_the_commonest_kind_leads_whoever_comes_first(found: list[dict[str, object]]):
    machines = Machines({})
    machines.lead(found)
    assert machines.platform == HERE
    assert machines.admit(HERE, "10.0.0.1") == Verdict(True)
    verdict = machines.admit(ODD, "10.0.0.2")
    assert not verdict.admitted
    check_sentence(verdict.notice, ["10.0.0.2", *UNLIKE])


def test_of_two_kinds_as_common_the_same_one_leads_in_any_order():
    leading = []
    for found in ([HERE, ODD], [ODD, HERE]):
        machines = Machines({})
        machines.lead(found)
        leading.append(machines.platform)
    assert leading[0] == leading[1]


def test_a_run_that_goes_on_keeps_the_kind_it_began_with_and_names_the_way_on():
    machines = Machines(HERE, resume="rayfl resume runs/a")
    assert machines.none_left() == ""
    machines.lead([ODD | {"cores": 2}, ODD])
    assert machines.platform == HERE
    assert not machines.admit(ODD, "10.0.0.2").admitted
    check_sentence(machines.none_left(), [*UNLIKE, "rayfl resume runs/a", "rayfl resume runs/a runtime.mixed=true"])


def test_what_decides_nothing_is_brought_up_to_date():
    machines = Machines(HERE)
    machines.lead([ODD, HERE | {"cores": 2}])
    assert machines.platform == HERE | {"cores": 2}


def test_a_mixed_run_takes_every_kind_and_records_each_once():
    machines = Machines(HERE, mixed=True)
    first, again = machines.admit(ODD, "10.0.0.2"), machines.admit(ODD, "10.0.0.3")
    assert first.admitted
    check_sentence(first.notice, ["10.0.0.2", "runtime.mixed", *UNLIKE])
    assert again == Verdict(True)
    assert machines.platform == HERE | {"mixed": [{"cpu": "another cpu", "gpu": "another gpu"}]}
    assert machines.admit(HERE, "10.0.0.1") == Verdict(True)


@pytest.mark.parametrize("key", DECISIVE)
def test_each_decisive_entry_keeps_machines_apart(key: str):
    here = describe(1)
    assert key in here
    assert not Machines(here).admit({**here, key: "else"}, "10.0.0.2").admitted
    assert not Machines({**here, key: "else"}).admit(here, "10.0.0.2").admitted
