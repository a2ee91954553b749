"""Write one self-contained HTML page about run directories: settings, results and costs; and its figures as files.

The page contains its numbers, its style and all of its JavaScript, that of Vega-Lite too, and does not let the browser
load anything else.
"""

import functools
import json
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from zlib import crc32

import jinja2
import pandas as pd

from rayfl.choices import plugins
from rayfl.data.sources.fetch import CACHE
from rayfl.determinism.platform import kinds_besides
from rayfl.errors import RayflError
from rayfl.experiment.report_options import ReportOptions, agreed_options
from rayfl.limits.regular_files import expanded, read_text
from rayfl.report import wording
from rayfl.report.charts import DARK, LIGHT, MOST_POINTS, NUM_COLORS, Figure, Spec, config
from rayfl.report.figures import sections
from rayfl.report.groups import Group, compared, facts_of, group_runs, has_seeds
from rayfl.report.numbers import WORKED, cost_columns, ranking, target_words, targets
from rayfl.report.page_tables import (
    TextTable,
    differences,
    fairness_tables,
    origins,
    shared_settings,
    sortable,
    statuses,
    tuning,
)
from rayfl.report.pivot import latex, tables_or_problems
from rayfl.report.series import facts, run_label, run_name, table_name
from rayfl.report.summary import comparison, summary
from rayfl.run_directory.disk import write_text
from rayfl.run_directory.record import Run, read_refused, read_run
from rayfl.run_directory.run_files import REPORT, OutputKind, require_replaceable, write_output
from rayfl.settings import dotted
from rayfl.untyped import Anything

_STILL = """
import base64, json, sys, vl_convert
both = [[vl_convert.vegalite_to_svg(one), vl_convert.vegalite_to_pdf(one)] for one in json.load(sys.stdin)]
print(json.dumps([[svg, base64.b64encode(pdf).decode()] for svg, pdf in both]))
"""

_CELL = (
    rf"^(?P<value>[+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?: {wording.PLUS_MINUS} (?P<sd>[\d.,]+(?:e[+-]?\d+)?))?"
    r"(?: (?P<unit>[^\d\s(]+))?(?: \((?P<n>\d+)\))?$"
)
"""A cell of a table that is a number: value, deviation, unit and count."""

MOST_LETTERS = 150
"""The length of a figure's file name, beside the checksum and the ending; most systems allow 255."""


def report(
    directories: Sequence[Path], output: Path, options: ReportOptions | None = None, overwrite: bool = False
) -> Path:
    """Write the page about one run or several to `output`, by default with the options on which all `[report]` tables
    agree.

    Raise RayflError if a directory is not a run, if none is given, or if `output` is a file other than a report and
    `overwrite` is false. The page says so if no run has a setting or an accuracy in `options`, because the runs that
    have it may have failed; `summary.require` refuses such options.
    """
    if not directories:
        raise RayflError("a report needs at least one run directory: name one")
    require_replaceable(output, REPORT, overwrite)
    runs = [read_run(directory) for directory in directories]
    shown = page(group_runs(runs), options or agreed_options([run.experiment for run in runs]))
    output.parent.mkdir(parents=True, exist_ok=True)
    write_output(output, _rendered(shown).encode(), REPORT, overwrite)
    return output


def _rendered(shown: Mapping[str, Anything]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = {
        f"chart{outer}-{inner}": figure.chart
        for outer, section in enumerate(shown["sections"], 1)
        for inner, figure in enumerate(section.figures, 1)
        if figure.chart
    }
    drawing = {"config": {"light": config(LIGHT), "dark": config(DARK)}, "charts": charts, "colors": shown["colors"]}
    return environment.get_template("page.html.j2").render(
        shown,
        light=LIGHT,
        dark=DARK,
        num_colors=NUM_COLORS,
        javascript=vega_javascript() if charts else "",
        charts=json.dumps(drawing, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        most_points=MOST_POINTS,
    )


def write_figures(runs: Sequence[Run], folder: Path, options: ReportOptions, overwrite: bool = False) -> list[Path]:
    """Write each figure of the page about runs as SVG and PDF, and its main tables as CSV and LaTeX (booktabs).

    Return the paths. Raise RayflError if the folder has files and `overwrite` is false.
    """
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise RayflError(f"{folder} has files already: name another folder, or give --overwrite")
    every = group_runs(runs)
    files = dict[str, bytes]()
    stills = {
        f"{section.title} {figure.title}": _still(figure, options.colors or {})
        for section in page(every, options)["sections"]
        for figure in section.figures
        if figure.chart
    }
    drawn = json.loads(converted(_STILL, json.dumps([*stills.values()]).encode()))
    for title, (svg, pdf) in zip(stills, drawn, strict=True):
        files |= {f"{title}.svg": svg.encode(), f"{title}.pdf": b64decode(pdf)}
    for table in comparison(runs, options):
        text = pd.DataFrame(table.rows, columns=pd.Index(table.heads))
        files[f"{table.title}.csv"] = in_numbers(text).to_csv(index=False).encode()
        files[f"{table.title}.tex"] = latex(text).encode()
    for table in tables_or_problems(every, options)[0]:
        files |= {f"{table.title}.csv": table.to_csv().encode(), f"{table.title}.tex": table.to_latex().encode()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_output(folder / _file_name(name), content, OutputKind("a figure or a table"), overwrite)
    return [folder / _file_name(name) for name in files]


def in_numbers(text: pd.DataFrame) -> pd.DataFrame:
    """A table of text with numbers for cells such as "50.0 +- 2.8 % (2)": the value, its deviation "sd" and its count
    "n" are columns, and the unit is in the heading. A column with other words, or with two units, stays as it is."""
    columns: dict[str, Anything] = {}
    for head, cells in text.items():
        fields = cells.str.extract(_CELL)
        units = fields["unit"].dropna().unique()
        if fields["value"].isna().ne(cells == wording.NONE).any() or fields["value"].isna().all() or len(units) > 1:
            columns[str(head)] = cells
        else:
            names = {"value": ", ".join([str(head), *units]), "sd": f"{head}, sd", "n": f"{head}, n"}
            columns |= {
                names[name]: pd.to_numeric(fields[name].str.replace(",", ""))
                for name in names
                if fields[name].notna().any()
            }
    return pd.DataFrame(columns)


def _file_name(title: str) -> str:
    """A title with its ending as a file's name; of a long one the beginning, and a checksum of the whole."""
    name, _, ending = title.rpartition(".")
    stem = re.sub(r"[^\w.]+", "-", name).strip("-")
    checksum = f"-{crc32(stem.encode()):08x}" * (len(stem) > MOST_LETTERS)
    return f"{stem[:MOST_LETTERS]}{checksum}.{ending}"


def _still(figure: Figure, colors: Mapping[str, str]) -> Spec:
    """The chart for a file: with a width in pixels, and as many columns of the legend as there is room for."""
    width = 640 if figure.wide else 360
    color = figure.chart.get("encoding", {}).get("color", {})
    labels = (color.get("legend") or {}).get("values", [""])
    style = config(LIGHT)
    named = zip(color.get("scale", {}).get("domain", []), cycle(style["range"]["category"]), strict=False)
    style["range"]["category"] = [colors.get(label, usual) for label, usual in named] or style["range"]["category"]
    style["legend"]["columns"] = max(1, width // (8 * max(map(len, labels)) + 45))
    return {**figure.chart, "width": width, "config": style}


def page(groups: Sequence[Group], options: ReportOptions) -> dict[str, Anything]:
    """The values that the template shows."""
    runs = [run for group in groups for run in group.runs]
    several = len(runs) > 1
    tables, problems = tables_or_problems(groups, options)
    groups, names, choices = compared(groups, options)
    shown = [run for group in groups for run in group.runs]
    label = groups[0].label
    # "name: label" if the run has a label of its own.
    title = f"{run_name(runs[0])}: {label}" if runs[0].experiment.get("label") else label
    return {
        "title": "Comparison of runs" if len(groups) > 1 else title,
        "num_runs": len(shown),
        "num_rounds": max(len(run.rounds) for run in shown),
        "num_clients": max(len(run.clients["client"].unique()) for run in shown),
        "method": plugins.short(table_name(shown[0], "method")),
        "data": plugins.short(table_name(shown[0], "data")),
        "sample": dotted(shown[0].experiment).get("evaluation.clients"),
        "on_validation": any(dotted(run.experiment).get("evaluation.split") == "validation" for run in shown),
        "of_one_group": len(groups) == 1,
        "note": options.note,
        "unfinished": [run_label(run) for run in runs if not run.finished],
        "mixed": [run_label(run) for run in runs if kinds_besides(run.platform)],
        "unmeasured": [
            f"{run_label(run)}, seed {run.experiment.get('seed')}"
            for run in runs
            if several and not run.metrics.num_rows
        ],
        "uneven": [group.label for group in groups if len({len(run.rounds) for run in group.runs}) > 1],
        "unknown_metric": options.metric if several and options.metric not in (None, *names) else None,
        "empty": not any(len(run.rounds) for run in runs),
        "cards": [] if several else _cards(runs[0], names),
        "targets": [
            (target_words(target, facts_of(groups, names[0])), targets(groups, names[0], target, options.last))
            for target in options.targets
            if several and names
        ],
        "tuning": tuning(choices, options.best_over, names[0], options.last) if several and choices else None,
        "best_over": options.best_over,
        "last": options.last,
        "metric": wording.title(names[0], facts_of(groups, names[0])) if names else "",
        "styles": {
            label: style
            for style, group in enumerate(groups)
            for label in (group.label, *(f"{group.label}, seed {seed}" for seed in group.seeds))
        },
        "with_seeds": has_seeds(groups),
        "colors": options.colors or {},
        "lead": bool(names),
        "ranking": ranking(groups, names, options) if several else None,
        "work": sortable(groups, cost_columns(groups, WORKED), "") if several else None,
        "fairness": fairness_tables(groups, names),
        "statuses": statuses(groups),
        "origins": origins(groups),
        "settings": shared_settings(groups),
        "differences": differences(groups) if len(groups) > 1 else None,
        "refused": TextTable(
            ["Combination", "Why"],
            [(label, why) for label, _, why in read_refused(run.directory for run in runs) if several],
        ),
        "tables": [table.table for table in tables],
        "ranks": [ranks.table for table in tables for ranks in table.ranks],
        "problems": problems,
        "sections": sections(groups, names, tables),
    }


def _cards(run: Run, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Headline numbers, the metrics `names` first: title, value and remark."""
    numbers = summary(run)
    up, down = numbers["uplink_kilobytes_per_client_round"], numbers["downlink_kilobytes_per_client_round"]
    return [
        *(
            (
                wording.title(name, facts(run, name)),
                facts(run, name).words(numbers["final"][name]),
                f"final; best {facts(run, name).words(best['value'])} in round {best['round']}",
            )
            for name in names
            if (best := numbers["best"].get(name))
        ),
        ("Total sent up", wording.megabytes(numbers["uplink_megabytes"]), f"{up:,.1f} kB per client per round"),
        ("Total sent down", wording.megabytes(numbers["downlink_megabytes"]), f"{down:,.1f} kB per client per round"),
        ("Simulated time", wording.seconds(numbers["simulated_s"]), "on the modelled clients and networks"),
        ("Wall-clock time", wording.seconds(numbers["wall_s"]), f"for {numbers['rounds']} rounds on this machine"),
    ]


_SCRIPT = "import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle().encode())"


@functools.cache
def vega_javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, which sets `window.vegaEmbed`; nothing in it ends a <script>.

    vl-convert takes two seconds to make the script, so it is kept in the cache of downloads, if there is one. Raise
    RayflError if vl-convert fails.
    """
    # A user without a home has no cache: RayflError, which is a ValueError.
    cached = CACHE / "charts" / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError, ValueError):
        return read_text(expanded(cached))
    script = converted(_SCRIPT).decode().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    with suppress(OSError, ValueError):
        path = expanded(cached)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, script)
    return script


def converted(code: str, text: bytes = b"") -> bytes:
    """Run `code`, which uses vl_convert and writes to standard output, with `text` as its standard input.

    It runs in another process, because vl-convert starts threads of a JavaScript engine. Raise RayflError if it fails.
    """
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, check=False)
    if done.returncode:
        why = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise RayflError(
            f"the charts of a page cannot be made (vl_convert ended with code {done.returncode}: {why}): "
            "reinstall vl-convert-python, or leave the page out by output.report=false"
        )
    return done.stdout
