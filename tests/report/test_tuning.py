"""Which value of a tuned setting wins, and that the page shows the winners alone."""

import math

from rayfl.experiment.identity import require_settings
from rayfl.experiment.report_options import ReportOptions
from rayfl.report.groups import Group, choose, group_runs
from rayfl.report.page import report
from rayfl.report.page_tables import tuning
from tests.hand_written import ACCURACY, heading, run_of
from tests.refusals import mentions, refused

OVER_LR = ["method.lr"]

LARGEST = ", the largest tried"
"""What stands behind a winning value beyond which nothing was tried."""


def runs_of(tmp_path, finals: dict[tuple[str, float], list[float]]) -> list[Group]:
    """A run a seed of the constant accuracies given by method and learning rate."""
    return group_runs(
        [
            run_of(
                tmp_path / f"{name}-{lr}-{seed}",
                {0: value},
                seed=seed,
                method={"name": name, "lr": lr},
                label=f"{name}, lr={lr}",
            )
            for (name, lr), values in finals.items()
            for seed, value in enumerate(values)
        ]
    )


FINALS = {
    # The best mean, 0.7, wins over the best single seed, 0.9.
    ("fedavg", 1.0): [0.9, 0.3],
    ("fedavg", 0.1): [0.7, 0.7],
    ("fedavg", 0.01): [0.2, 0.4],
    # The best at the end of the grid; one seed only.
    ("local", 0.01): [0.4],
    ("local", 0.1): [0.5],
    # Nothing to choose from.
    ("lag", 0.5): [0.3],
}


def test_the_best_mean_of_each_method_wins_and_the_grid_is_in_order(tmp_path):
    choices = choose(runs_of(tmp_path, FINALS), OVER_LR, ACCURACY, 3)
    assert [(choice.winner.label, [group.label for group in choice.grid]) for choice in choices] == [
        ("fedavg, lr=0.1", ["fedavg, lr=0.01", "fedavg, lr=0.1", "fedavg, lr=1.0"]),
        ("local, lr=0.1", ["local, lr=0.01", "local, lr=0.1"]),
        ("lag, lr=0.5", ["lag, lr=0.5"]),
    ]


def test_the_table_says_what_won_of_what(tmp_path):
    found = choose(runs_of(tmp_path, FINALS), OVER_LR, ACCURACY, 3)
    table = tuning(found, OVER_LR, ACCURACY, 3)
    _, best, tried = table.heads
    assert mentions(best, "method.lr") and "*" in tried
    # Deviations: 0.6 / sqrt(2) and 0.2 / sqrt(2).
    grid = "0.01: 30.0 \u00b1 14.1 % (2)\n0.1: 70.0 \u00b1 0.0 % (2) *\n1: 60.0 \u00b1 42.4 % (2)"
    assert table.rows == [
        ["fedavg, lr=0.1", "0.1", grid],
        ["local, lr=0.1", f"0.1{LARGEST}", "0.01: 40.0 % (1)\n0.1: 50.0 % (1) *"],
        ["lag, lr=0.5", "0.5", "0.5: 30.0 % (1) *"],
    ]


def test_the_mean_of_the_last_evaluations_decides_and_of_equals_the_smallest_value(tmp_path):
    ends = {3.0: {0: 0.6, 1: 0.6}, 2.0: {0: 0.1, 1: 0.9}, 1.0: {0: 0.6, 1: 0.6}, 0.5: {}}
    found = group_runs([run_of(tmp_path / str(lr), ends[lr], rounds=2, label=str(lr), lr=lr) for lr in ends])
    assert [choose(found, ["lr"], ACCURACY, last)[0].winner.label for last in (1, 2)] == ["2.0", "1.0"]


def test_several_settings_and_whole_tables_can_be_tuned(tmp_path):
    settings = [
        {"method": {"lr": lr}, "uplink": uplink}
        for lr in (0.1, 0.2)
        for uplink in ({"name": "dense"}, {"name": "topk", "keep_ratio": 0.1})
    ]
    runs = [run_of(tmp_path / str(n), {0: n / 10}, **one, label=str(n)) for n, one in enumerate(settings)]
    by_uplink = choose(group_runs(runs), ["uplink"], ACCURACY, 3)
    assert [choice.winner.label for choice in by_uplink] == ["1", "3"]
    (both,) = choose(group_runs(runs), ["method.lr", "uplink"], ACCURACY, 3)
    assert (both.winner.label, len(both.grid)) == ("3", 4)
    table = tuning([both], ["method.lr", "uplink"], ACCURACY, 3)
    assert table.rows[0][1:3] == [f"0.2{LARGEST}", "name topk, keep_ratio 0.1"]


def test_a_key_is_tuned_as_a_whole_and_not_by_its_first_letters(tmp_path):
    runs = [run_of(tmp_path / str(n), {0: 0.5}, lr=1, lr_decay=n, label=str(n)) for n in range(2)]
    assert [choice.winner.label for choice in choose(group_runs(runs), ["lr"], ACCURACY, 3)] == ["0", "1"]


def test_the_page_shows_the_winners_alone(tmp_path):
    directories = [run.directory for group in runs_of(tmp_path, FINALS) for run in group.runs]
    options = ReportOptions(best_over=("method.lr",), target=0.5, last=1)
    page = report(directories, tmp_path / "page.html", options).read_text(encoding="utf-8")
    assert mentions(heading(page, "tuning"), "method.lr") and mentions(heading(page, "target"), "50 %")
    for (name, lr), shown in zip(FINALS, (0, 1, 0, 0, 1, 1), strict=True):
        assert (f">{name}, lr={lr}<" in page.replace("</span>", ">")) == bool(shown), (name, lr)
    everything = report(directories, tmp_path / "page.html").read_text(encoding="utf-8")
    assert heading(everything, "tuning") == "" and "fedavg, lr=0.01" in everything


def test_a_setting_that_no_run_has_is_refused(tmp_path):
    experiments = [{"seed": 1, "method": {"name": "fedavg", "lr": 0.1}}]
    require_settings(experiments, ["method.lr", "method"])
    for name, known in (("method.lrr", "'method.lr'"), ("seed", "mean over seeds")):
        with refused(names=[repr(name), known]):
            require_settings(experiments, [name])


def test_runs_without_any_value_keep_their_place(tmp_path):
    found = runs_of(tmp_path, {("a", 1.0): [math.nan], ("a", 2.0): [0.1], ("b", 1.0): [math.nan]})
    assert [one.winner.label for one in choose(found, OVER_LR, ACCURACY, 3)] == ["a, lr=2.0", "b, lr=1.0"]
