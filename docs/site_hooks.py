"""What MkDocs does besides when it builds the site: tables of commands and settings, and links.

Pages link to files of the repository by relative paths, so that the links also work where the files
lie. A link that leaves docs/ leads in the site to a copy of the file, under repository/.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

import cli_pages  # noqa: E402

from jaxformer.training.config_files import to_toml  # noqa: E402
from jaxformer.training.presets import nano  # noqa: E402

COPIES = "repository"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
# What stands in the site where a page has such a comment.
GENERATED = {
    "<!-- generated: commands -->": cli_pages.commands,
    "<!-- generated: settings of nano -->": lambda: f"```toml\n{to_toml(nano())}```",
}


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the files of the repository that pages link to."""
    wanted = {ROOT / name for name in PAGES}
    for page in [*(file.abs_src_path for file in files if file.is_documentation_page()), *wanted]:
        if page is None:
            continue
        wanted |= {target for target in _targets(Path(page)) if not target.is_relative_to(DOCS)}
    for path in sorted(wanted):
        name = f"{COPIES}/{path.relative_to(ROOT)}"
        if path.is_dir():
            raise ValueError(f"a page links to the folder {path}: link to a file")
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns a page with what is generated, and its links as they are in the site."""
    for mark, make in GENERATED.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    own = page.file.src_uri
    source = _source(own)

    def in_site(match: re.Match[str]) -> str:
        _, mark, place = match[2].partition("#")
        target = _resolve(source, match[2])
        if target is None:
            return match[0]
        if target.is_relative_to(DOCS):
            name = target.relative_to(DOCS).as_posix()
        else:
            name = f"{COPIES}/{target.relative_to(ROOT).as_posix()}"
        link = os.path.relpath(name, os.path.dirname(own) or ".")
        return f"{match[1]}{link}{mark}{place}{match[3]}"

    return LINK.sub(in_site, markdown)


def _source(uri: str) -> Path:
    """Returns the file of the repository that a page of the site is made of."""
    if uri.startswith(f"{COPIES}/"):
        return ROOT / uri.removeprefix(f"{COPIES}/")
    return DOCS / uri


def _resolve(page: Path, link: str) -> Path | None:
    """Returns the file that a link of a page means; None if it is none of the repository's."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", link):
        return None
    target = Path(os.path.normpath(page.parent / path))
    return target if target.is_relative_to(ROOT) and target.exists() else None


def _targets(page: Path) -> set[Path]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = (_resolve(page, match[2]) for match in LINK.finditer(text))
    return {target for target in found if target is not None}
