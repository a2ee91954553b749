"""Methods ranked over data sets: Friedman, Nemenyi's critical difference, and Wilcoxon for two methods."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from rayfl.report import wording
from rayfl.run_directory.record import Run
from tests.hand_written import heading, run_of
from tests.jobs.commands import rayfl
from tests.refusals import mentions
from tests.report.test_pivot import says, table_of

# Accuracies of three methods on four data sets: ranks 3 2 1, 3 1 2, 3 2 1 and 3 1.5 1.5.

ON_DATA = {
    "mnist": {"local": 0.5, "fedavg": 0.6, "ditto": 0.7},
    "cifar": {"local": 0.2, "fedavg": 0.5, "ditto": 0.4},
    "femnist": {"local": 0.1, "fedavg": 0.3, "ditto": 0.6},
    "digits": {"local": 0.8, "fedavg": 0.9, "ditto": 0.9},
}


def runs_on_data(folder, values=ON_DATA, seeds=(1, 2)) -> list[Run]:
    """Runs of a sweep over methods and data sets; the seeds lie 0.01 above and below the value."""
    return [
        run_of(
            folder / f"{method} {data} {seed}",
            {0: value + 0.01 * (2 * seed - 3)},
            seed=seed,
            label=f"{method}, {data}",
            method={"name": method},
            data={"name": data},
            swept={"method": method, "data": data},
        )
        for data, methods in values.items()
        for method, value in methods.items()
        for seed in seeds
    ]


@pytest.mark.parametrize(("rows", "columns"), [("method", "data"), ("data", "method")])
def test_methods_are_ranked_over_the_axis_of_data_sets(tmp_path, rows, columns):
    (ranks,) = table_of(runs_on_data(tmp_path), rows=rows, columns=columns).ranks
    frame = ranks.frame
    # 1 + 2 + 1 + 1.5 = 5.5, 2 + 1 + 2 + 1.5 = 6.5 and 4 * 3, each over 4.
    assert frame["Method"].tolist() == ["ditto", "fedavg", "local"]
    assert frame["Average rank"].tolist() == [1.375, 1.625, 3.0]
    _, p = stats.friedmanchisquare(*np.array([[*one.values()] for one in ON_DATA.values()]).T)
    assert ranks.compared.p == pytest.approx(p) and p < 0.05
    # q is 2.343 (Demsar 2006, table 5), so the difference is 2.343 * sqrt(3 * 4 / (6 * 4)) = 1.657: more than 1.625.
    assert ranks.compared.critical == pytest.approx(2.343 * math.sqrt(0.5), abs=1e-3)
    assert frame["Differs from"].tolist() == [wording.NONE] * 3
    assert says(ranks.note, "4 data sets", "Friedman", f"{p:.2g}", "1.66")
    assert "So few" not in ranks.note


def test_data_sets_on_which_a_method_lacks_values_are_left_out_and_two_methods_take_wilcoxons_test(tmp_path):
    two = {data: {name: values[name] for name in ("local", "ditto")} for data, values in ON_DATA.items()}
    del two["digits"]["local"]
    (ranks,) = table_of(runs_on_data(tmp_path / "two", two), rows="method", columns="data").ranks
    assert (ranks.left_out, ranks.compared.num_data, ranks.compared.critical) == (1, 3, 0.0)
    # All three differences have one sign: 2 of 8 ways to choose the signs are as far from 0.
    assert ranks.compared.p == pytest.approx(0.25)
    assert says(ranks.note, "left out: 1", "3 data sets", "Wilcoxon", "0.25", "So few data sets")
    del two["cifar"]["local"], two["mnist"]["ditto"]
    (ranks,) = table_of(runs_on_data(tmp_path / "one", two), rows="method", columns="data").ranks
    assert says(ranks.note, "left out: 3", "1 data set", "too few")
    assert "nan" not in ranks.note


def test_the_comparison_and_the_page_show_ranks_over_data_sets(tmp_path):
    runs_on_data(tmp_path)
    printed = rayfl("compare", tmp_path)
    assert says(printed.output, "ranks over data sets", "Average rank", "1.38", "Friedman", "1.66")
    page = tmp_path / "page.html"
    assert rayfl("report", tmp_path, "--output", page, "--figures", tmp_path / "figures").exit_code == 0
    html = page.read_text(encoding="utf-8")
    assert mentions(heading(html, "ranks1"), "Ranks over data sets") and "Average ranks: " in html
    (file,) = (tmp_path / "figures").glob("ranks-over-data-sets*.csv")
    assert pd.read_csv(file)["Average rank"].tolist() == [1.38, 1.62, 3.0]
    (figure,) = (tmp_path / "figures").glob("Average-ranks*.svg")
    assert all(f">{name}<" in figure.read_text(encoding="utf-8") for name in ("ditto", "fedavg", "local"))


def test_one_method_has_no_rank(tmp_path):
    one = {data: {"ditto": values["ditto"]} for data, values in ON_DATA.items()}
    assert table_of(runs_on_data(tmp_path, one), rows="method", columns="data").ranks == []
