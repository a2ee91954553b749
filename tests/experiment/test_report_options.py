"""What decides on a page: the `[report]` table, the options of `rayfl report` and `rayfl sweep`, and their mistakes."""

import pytest
from click.testing import CliRunner

from jobs.cli import main
from rayfl import toml
from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.identity import determining_settings
from rayfl.experiment.report_options import ReportOptions, agreed_options
from rayfl.report import wording
from tests.hand_written import heading, run_of
from tests.refusals import mentions, refused

SWEEP = """
rounds = 1
data = "digits"
partition = "iid"
model = "logistic"
clients = {count = 2}
method = {name = "fedavg"}
runtime = {executor = "inline"}
output = {report = false, save_models = false}

[report]
target = 0.05

[sweep]
method.lr = [0.1, 0.2]
"""


def rayfl(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_options_go_before_what_the_runs_agree_on_and_that_before_the_defaults():
    one = {"report": {"target": 0.5, "last": 5, "best_over": ["lr"], "metric": None, "of a later version": 1}}
    other = {"report": {"target": 0.6, "last": 5, "best_over": ["lr"], "metric": None}}
    assert agreed_options([one, other]) == ReportOptions(last=5, best_over=("lr",))
    assert agreed_options([one, other], {"last": 1}) == ReportOptions(last=1, best_over=("lr",))
    assert agreed_options([one, {}]) == agreed_options([one, {"report": "?"}]) == agreed_options([]) == ReportOptions()


@pytest.mark.parametrize("values", [{"target": "80"}, {"last": 0}, {"best_over": "method.lr"}])
def test_what_makes_no_sense_is_refused(values):
    with refused(names=[f"{next(iter(values))}=", "must be"]):
        ReportOptions(**values)


def test_the_table_is_part_of_the_experiment_and_parts_no_runs(tmp_path):
    file = tmp_path / "one.toml"
    file.write_text(SWEEP)
    plain, said = read(file, ["report.target=0.8"]), read(file, ['report.best_over=["method.lr"]'])
    assert (plain.report.target, said.report.best_over) == (0.8, ("method.lr",))
    assert determining_settings(plain.as_dict()) == determining_settings(said.as_dict())
    assert Experiment(**said.as_dict()) == said
    file.write_text(toml.dumps(said.as_dict()))
    assert read(file) == said


def test_a_sweep_shows_the_best_and_its_report_can_be_read_otherwise(tmp_path):
    file, page = tmp_path / "small.toml", tmp_path / "all" / "comparison.html"
    file.write_text(SWEEP)
    result = rayfl("sweep", file, "--dir", page.parent, "--best-over", "method.lr")
    assert result.exit_code == 0, result.output
    html = page.read_text(encoding="utf-8")
    assert mentions(heading(html, "target"), "5 %") and mentions(heading(html, "tuning"), "method.lr")
    # What the finished runs wrote down does not bind the sweep's next page.
    assert rayfl("sweep", file, "--dir", page.parent, "--target", "0.06").exit_code == 0
    html = page.read_text(encoding="utf-8")
    assert mentions(heading(html, "target"), "6 %") and heading(html, "tuning") == ""
    assert rayfl("report", page.parent, "--target", "0.07", "--last", "2", "--metric", "own/accuracy").exit_code == 0
    html = page.read_text(encoding="utf-8")
    assert mentions(heading(html, "target"), "7 %") and mentions(heading(html, "tuning"), "method.lr")
    order = html.partition('<h2 id="runs">')[2].partition("</p>")[0]
    assert mentions(order, "last 2 evaluations") and mentions(order, wording.title("own/accuracy"))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--best-over", "method.lrr"], ["method.lrr", "method.lr"]),
        (["--metric", "pooled/acc"], ["pooled/acc", "pooled/accuracy"]),
        (["--target", "80"], ["report.target=80", "pooled/accuracy", "0 to 1"]),
        (["--last", "0"], ["last=0", "at least 1"]),
    ],
)
def test_mistakes_get_a_sentence(tmp_path, options, names):
    run = run_of(tmp_path / "run", {0: 0.5}, method={"lr": 1})
    result = rayfl("report", run.directory, *options)
    refused(result, names=names)
    assert not (run.directory / "report.html").exists()


def test_a_sweep_refuses_what_cannot_be_tuned_before_it_runs(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(SWEEP)
    result = rayfl("sweep", file, "--dir", tmp_path / "all", "--best-over", "lr")
    # The sentence lists all settings, so it is long.
    assert result.exit_code == 2 and mentions(result.stderr, "'lr'") and mentions(result.stderr, "method.lr")
    assert not (tmp_path / "all").exists()
