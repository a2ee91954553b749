"""What the README shows is what there is: the method's source, the files behind its links, the commands."""

import re
from pathlib import Path

from jobs.reporting import result_table
from rayfl.experiment.experiment import read
from rayfl.report.summary import Summary
from tests.test_docs import ROOT, blocks

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_method_shown_is_the_whole_file():
    assert [one.text for one in blocks(README, "python")] == [
        (ROOT / "rayfl" / "methods" / "server" / "fedprox.py").read_text(encoding="utf-8")
    ]


def test_every_target_of_make_that_it_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {
        word for pair in re.findall(r"^make ([a-z]+)$|`make ([a-z]+)`", README, flags=re.MULTILINE) for word in pair
    }
    assert {"demo", "docs", "test"} <= named - {""} <= targets


def test_the_table_of_the_demo_has_the_rows_that_are_printed():
    (shown,) = [one.text for one in blocks(README, "") if one.text.startswith("demo: ")]
    experiment = read(ROOT / "jobs" / "experiments" / "demo.toml")
    assert shown.startswith(f"demo: {experiment.rounds} rounds, 0 to {experiment.rounds - 1}\n")
    numbers: Summary = {
        "name": "demo",
        "directory": "",
        "finished": True,
        "rounds": experiment.rounds,
        "early_stop": "",
        "resources": {"cpu_hours": 0.01, "gpu_hours": 0.0, "peak_bytes": 1e9, "gpu_peak_bytes": 0.0},
        "final": {},
        "best": {},
        "uplink_megabytes": 0.0,
        "downlink_megabytes": 0.0,
        "uplink_kilobytes_per_client_round": 0.0,
        "downlink_kilobytes_per_client_round": 0.0,
        "clients_per_round": 0.0,
        "steps_per_client_round": 0.0,
        "examples_per_client_round": 0.0,
        "delivered": 0,
        "selected": 0,
        "simulated_s": 0.0,
        "wall_s": 0.0,
        "units": {},
        "fairness": {},
        "privacy": {},
    }
    printed = [str(cell) for cell in result_table(numbers).columns[0].cells]
    rows = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert [row for row in rows if not row.startswith(("final ", "best "))] == printed


def test_its_links_lead_to_files_of_the_repository():
    links = re.findall(r"\]\(((?:docs|k8s)/[^)#]+)", README)
    assert links and all(Path(ROOT, link).is_file() for link in links)
