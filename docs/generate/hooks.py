"""The hooks that mkdocs calls when it builds the site (mkdocs.yml): they make the pages that are not in git.

A mark such as `<!-- reference: compressors -->` is replaced by the section of that name; every method gets a page;
k8s/README.md and CHANGELOG.md become pages.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs.generate.markdown import code
from docs.generate.pages import COMPARISONS, METHODS, SECTIONS, method_page, with_row_anchors
from rayfl.choices.kinds import named
from rayfl.methods.base import Method

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {"k8s/README.md": "kubernetes.md", "CHANGELOG.md": "changelog.md"}
"""Files outside docs/ that are pages of the site. Links to them, written as GitHub needs them, lead to these pages."""
MARK = re.compile(r"<!-- reference: ([a-z-]+) -->")


def on_config(config: "MkDocsConfig") -> None:
    """Put the pages of the methods into the navigation, and leave out 404.html: its links begin at a server's root."""
    config.theme.static_templates.discard("404.html")
    for pages in _lists(config.nav or []):
        if f"{METHODS}/index.md" in pages:
            pages += [f"{METHODS}/{name}.md" for name in named(Method)]


def on_files(files: "Files", config: "MkDocsConfig") -> None:
    """Add the pages that are not files of docs/."""
    from mkdocs.structure.files import File

    for name, method in named(Method).items():
        files.append(File.generated(config, f"{METHODS}/{name}.md", content=method_page(name, method)))
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=outside_page(path)))


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Insert the generated sections, and point links to files outside docs/ to their pages."""
    if page.parent is None:
        # A tab with one page needs no list of pages.
        page.meta["hide"] = ["navigation"]
    up = "../" * page.file.src_uri.count("/")
    for path, name in OUTSIDE.items():
        markdown = markdown.replace(f"]({up}../{path}", f"]({up}{name}")
    if page.file.src_uri == COMPARISONS:
        markdown = with_row_anchors(markdown)
    return with_sections(markdown)


def outside_page(path: str) -> str:
    """A file outside docs/ as a page; links to other files of the repository become the paths of these files."""
    folder = Path(path).parent

    def named_file(link: re.Match[str]) -> str:
        file = (folder / link[2]).as_posix()
        return code(file) if link[1] == link[2] else f"{link[1]} ({code(file)})"

    text = (ROOT / path).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)", named_file, text)


def with_sections(markdown: str) -> str:
    """The page with the generated sections in place of their marks."""
    return MARK.sub(lambda mark: SECTIONS[mark[1]](), markdown)


# Any: the navigation of mkdocs.yml.
def _lists(nav: Any) -> Iterable[list[Any]]:
    """Every list of pages in the navigation."""
    if isinstance(nav, list):
        yield nav
    parts = nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ()
    for part in parts:
        yield from _lists(part)
