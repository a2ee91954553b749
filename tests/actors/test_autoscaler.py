"""Ray's own autoscaler, which starts nodes for a run on a cluster without any, and takes them back."""

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.single import run
from rayfl import toml
from tests.actors.heads import HEAD_ID, TOKEN, Head, environment, started_head
from tests.actors.toys import assert_same_run, experiment
from tests.refusals import check_sentence

ROOT = Path(__file__).resolve().parents[2]


def living(head: Head) -> dict[str, str | None]:
    """The label `zone` of the nodes that work, by their ids."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    asked = urllib.request.Request(f"{head.dashboard}/nodes?view=summary", headers=headers)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        found = [each["raylet"] for each in json.load(answer)["data"]["summary"]]
    return {each["nodeId"]: each["labels"].get("zone") for each in found if each.get("state") == "ALIVE"}


@contextmanager
def nodes_seen(head: Head) -> Iterator[list[dict[str, str | None]]]:
    """The nodes that worked, one look after the other, from before until after what is done inside."""
    deadline = time.monotonic() + 60
    while not (now := living(head)) and time.monotonic() < deadline:
        time.sleep(0.1)
    seen, over = [now], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            seen.append(living(head))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_nodes_are_started_for_a_run_and_taken_back(tmp_path: Path) -> None:
    chosen = experiment("scaffold", output={"report": False})
    file, directory = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(toml.dumps(chosen.as_dict()))
    size = {"CPU": 1, "object_store_memory": 150 * 10**6}
    kinds = {zone: {"resources": size, "max_workers": 3, "labels": {"zone": zone}} for zone in ("west", "east")}
    with started_head(0, kinds) as head:
        runtime = {"address": head.address, "actors": 2, "wait_for_room_s": 200, "labels.zone": "east"}
        settings = [f"runtime.{key}={value}" for key, value in runtime.items()]
        with nodes_seen(head) as seen:
            command = [sys.executable, "-m", "jobs.cli", "run", str(file), "--output", str(directory), *settings]
            done = subprocess.run(
                command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            deadline = time.monotonic() + 120
            while len(living(head)) > 1 and time.monotonic() < deadline:
                time.sleep(0.2)
        assert list(living(head)) == [HEAD_ID], "nodes that nobody uses are taken back"
    # A slow machine may say once more how many actors wait.
    waiting = [line for line in (done.stdout + done.stderr).splitlines() if "zone=east" in line]
    assert 1 <= len(waiting) <= 2, waiting
    check_sentence(waiting[0], ["2 actors", "num_cpus=1", "num_gpus=0", "zone=east", "runtime.wait_for_room_s=200"])
    # The run may be over when the second of its nodes is there.
    assert list(seen[0]) == [HEAD_ID] and 2 <= max(map(len, seen)) <= 3
    assert {zone for nodes in seen for zone in nodes.values()} == {None, "east"}
    inline = experiment("scaffold", runtime={"executor": "inline"}, output={"report": False})
    assert_same_run(directory, run(inline, tmp_path / "inline"))
