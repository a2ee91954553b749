"""Files of a trace of availability."""

import os
from typing import Any

from tests.hostile.case import Case, Content, experiment
from tests.hostile.kinds.damage import DEEP_JSON, GARBAGE, endless, folder, link_to_itself, link_to_nothing

HEADER = "client,first_round,last_round\n"


def trace(
    name: str, content: Content, *names: str, in_suite: bool = False, in_process: bool = False, code: int = 2
) -> Case:
    """Four clients with this trace, refused in a sentence that names it."""
    return Case(
        "trace",
        name,
        ["run", "bad.toml", "--output", "run"],
        [*names, *(["trace.csv"] if code else [])],
        {"trace.csv": content, "bad.toml": told(trace="trace.csv")},
        code=code,
        may_write=[] if code else ["run"],
        in_suite=in_suite,
        in_process=in_process,
    )


# Any: settings of a trace.
def told(**availability: Any) -> str:
    return experiment(clients={"count": 4, "availability": availability})


# Any: as above.
def setting(name: str, /, *names: str, **availability: Any) -> Case:
    """A wrong setting beside a right trace."""
    files = {"trace.csv": HEADER + "0,0,9\n", "bad.toml": told(**availability)}
    return Case("trace", name, ["run", "bad.toml"], names, files)


def line(name: str, text: str, *names: str, in_suite: bool = False) -> Case:
    """A trace whose second line is this text."""
    return trace(name, f"{HEADER}0,0,9\n{text}\n", "line 3", *names, in_suite=in_suite)


CASES = [
    trace("valid", HEADER + "0,0,9\n1,0,9\n2,0,9\n3,0,0\n", code=0),
    trace("valid with a byte-order mark", "\ufeff" + HEADER + "0,0,9\n1,0,9\n", code=0),
    trace("valid: to the end of time", HEADER + "0,0," + "9" * 400 + "\n", code=0),
    # Paths.
    trace("no such file", lambda path: None, in_process=True),
    trace("a folder", folder),
    trace("a FIFO", os.mkfifo),
    trace("a device", endless),
    trace("a link to nothing", link_to_nothing),
    trace("a link to itself", link_to_itself),
    setting("a name of 300 letters", "xxx", trace="x" * 300),
    setting("a name with a null byte", "clients.availability.trace", trace="a\0b"),
    setting("no name", "clients.availability.trace", trace=""),
    setting("a number for a name", "clients.availability.trace", trace=5),
    setting("the home of nobody", "~nobody-of-this-name/x", trace="~nobody-of-this-name/x"),
    setting("repeat zero", "clients.availability.repeat", trace="trace.csv", repeat=0),
    setting("repeat a fraction", "clients.availability.repeat", trace="trace.csv", repeat=1.5),
    setting("an unknown key", "clients.availability.repeet", trace="trace.csv", repeet=5),
    # Files.
    trace("empty", ""),
    trace("garbage", GARBAGE),
    trace("zeros", b"\0" * 1000),
    trace("UTF-16", (HEADER + "0,0,9\n").encode("utf-16")),
    trace("no header", "0,0,9\n", "header"),
    trace("another header", "client,first,last\n0,0,9\n", "header"),
    trace("JSON", DEEP_JSON),
    trace("an open quotation mark", HEADER + '"0,0,9\n'),
    trace("a field of 10 MB", HEADER + "0," + "1" * 10_000_000 + ",9\n"),
    trace("a NUL in a line", HEADER + "0,0\0,9\n"),
    # Lines.
    line("two values", "1,2"),
    line("four values", "1,2,3,4"),
    line("words", "a,b,c"),
    line("fractions", "1,0.5,9"),
    line("empty values", ",,"),
    line("client 4", "4,0,9", "4,0,9"),
    line("client -1", "-1,0,9", "-1,0,9"),
    line("backwards", "1,9,0"),
    line("before the first round", "1,-1,5"),
    line("a client of 5,000 digits", "9" * 5000 + ",0,9"),
    line("a round of 5,000 digits", "1,0," + "9" * 5000, in_suite=True),
    line("a client of 30 digits", "9" * 30 + ",0,9"),
    line("hexadecimal", "0x1,0,9"),
    line("NaN", "nan,0,9"),
]
