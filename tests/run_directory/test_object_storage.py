"""URLs of object storage: which are taken, and one sentence for the others."""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rayfl.experiment.experiment import Experiment
from rayfl.run_directory import object_storage
from rayfl.run_directory.object_storage import Storage, StorageError, below, is_url, parted, require_path, require_url
from tests.actors.toys import experiment
from tests.refusals import refused
from tests.run_directory.s3_server import KEYS, Server


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://bucket/a/b?endpoint_override=host:9000&scheme=http",
        "gs://bucket/a",
        "abfs://container@account.dfs.core.windows.net/a",
    ],
)
def test_what_pyarrow_has_is_taken(url: str):
    require_url(url)
    assert is_url(url)


SECRET = ["key", "password", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]


@pytest.mark.parametrize(
    ("url", "facts"),
    [
        ("s4://bucket/a", ["s4://", "s3", "gs", "abfs"]),
        ("file:///a", ["file:///a", "path"]),
        ("memory://a/b", ["memory://", "s3"]),
        ("hdfs://name:8020/a", ["hdfs://", "s3"]),
        ("https://host/a", ["https://", "s3"]),
        ("s3:bucket/a", None),
        ("lr:0.1", None),
        ("simplecache::s3://bucket/a", ["simplecache::s3://bucket/a", "s3"]),
        ("data:,x", ["data:,x"]),
        ("s3:/bucket/a", ["s3:/bucket/a", "s3://bucket/folder"]),
        ("s3:///a", ["s3:///a", "s3://bucket/folder"]),
        ("s3://bucket/../a", ["s3://bucket/../a", "s3://bucket/folder"]),
        ("s3://bucket/a?tls_verify_certificates=false", ["tls_verify_certificates", "tls_ca_file_path"]),
        ("s3://bucket/a#b", ["s3://bucket/a#b", "s3://bucket/folder"]),
        ("s3://key:hidden@bucket/a", SECRET),
        ("s3://bucket/a?secret_key=x", SECRET),
        ("abfs://a@b.dfs.core.windows.net/c?sas_token=x", SECRET),
    ],
)
def test_what_is_no_place_for_a_run_is_refused_before_it(url: str, facts: list[str] | None):
    if facts is None:
        # A folder may be called so.
        assert experiment(output={"directory": url}).output.directory == url
        return
    with refused(names=["output.directory", *facts]):
        experiment(output={"directory": url})


@pytest.mark.parametrize("url", ["s3://key:hidden@bucket/a", "s3:///a?secret_key=hidden", "s4://a:hidden@b/c"])
def test_a_secret_is_not_repeated(url: str):
    with refused(names=["key", "password"]) as raised:
        require_url(url)
    assert "hidden" not in str(raised.value)


def test_a_url_is_no_path():
    for text in ("s3://bucket/a", "s3:/bucket/a", "nonsense://a"):
        with refused(names=[text, "URL", "path on this machine"]):
            require_path(text)
    for text in ("runs", "/tmp/a:b", "a:/b", "C:/x"):
        require_path(text)


def test_options_stay_where_names_are_put_together_and_taken_apart():
    url = "s3://bucket/a?region=eu-west-1"
    assert below(url, "run") == "s3://bucket/a/run?region=eu-west-1"
    assert parted(below(url, "run")) == (url, "run")
    assert parted(below("s3://bucket", "run")) == ("s3://bucket", "run")
    with refused(names=["s3://bucket/NAME"]):
        parted("s3://bucket")


def test_the_table_takes_a_url_and_gives_it_back():
    url = "s3://bucket/a?region=eu-west-1"
    chosen = experiment(output={"directory": url})
    assert Experiment(**chosen.as_dict()).output.directory == url


def test_a_request_to_a_storage_that_never_answers_fails_after_three_tries(monkeypatch: pytest.MonkeyPatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_storage, "REQUEST_S", 1.0)
    taken: list[socket.socket] = []

    def take(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                taken.append(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        threading.Thread(target=take, args=(deaf,), daemon=True).start()
        storage = Storage(Server(deaf.getsockname()[1]).url("bucket/a"))
        for number, ask in enumerate((storage.files, lambda: storage.put("a", Path(os.devnull))), start=1):
            with pytest.raises(StorageError, match="NETWORK_CONNECTION"):
                ask()
            assert len(taken) == 3 * number


def test_the_options_of_a_url_are_kept_beside_the_limits(monkeypatch: pytest.MonkeyPatch):
    from pyarrow.fs import S3FileSystem

    given: dict[str, Any] = {}

    class Noted(S3FileSystem):
        def __new__(cls, **options: Any) -> "Noted":
            given.update(options)
            return super().__new__(cls)

    monkeypatch.setattr("pyarrow.fs.S3FileSystem", Noted)
    Storage("s3://bucket/a?region=eu-west-1&endpoint_override=host:9000&scheme=http&allow_delayed_open=true")
    wanted = {"region": "eu-west-1", "endpoint_override": "host:9000", "scheme": "http", "allow_delayed_open": True}
    assert wanted.items() <= given.items()
    # Found in the environment again and again, because those of a role end.
    assert (given["access_key"], given["connect_timeout"], given["request_timeout"]) == (None, 10.0, 10.0)
