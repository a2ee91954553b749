"""The JavaScript of Vega-Lite, which each page contains, so that it needs no network."""

import functools
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version

from rayfl.data.sources.fetch import CACHE
from rayfl.errors import RayflError
from rayfl.limits.regular_files import expanded, read_text
from rayfl.run_directory.disk import write_text

_SCRIPT = "import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle().encode())"


@functools.cache
def vega_javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, which sets `window.vegaEmbed`; nothing in it ends a <script>.

    vl-convert takes two seconds to make the script, so it is kept in the cache of downloads, if there is one. Raise
    RayflError if vl-convert fails.
    """
    # A user without a home has no cache: RayflError, which is a ValueError.
    place = CACHE / "charts" / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError, ValueError):
        return read_text(expanded(place))
    made = converted(_SCRIPT).decode().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    with suppress(OSError, ValueError):
        path = expanded(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, made)
    return made


def converted(code: str, given: bytes = b"") -> bytes:
    """Run `code`, which uses vl_convert and writes to standard output, with `given` as its standard input.

    It runs in another process, because vl-convert starts threads of a JavaScript engine. Raise RayflError if it fails.
    """
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, check=False)
    if done.returncode:
        why = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise RayflError(
            f"the charts of a page cannot be made (vl_convert ended with code {done.returncode}: {why}): "
            "reinstall vl-convert-python, or leave the page out by output.report=false"
        )
    return done.stdout
