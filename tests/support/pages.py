"""The pages of the documentation, and the blocks of commands and Python in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = "README.md"
LANGUAGES = ("sh", "bash", "python")
# A block of code, and the comment before it that says why no test runs it.
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        language: sh, bash or python.
        code: its text.
        reason: why no test runs it; None if one does.
    """

    language: str
    code: str
    reason: str | None

    @property
    def commands(self):
        """The commands of a shell's block, each in one line and without comments."""
        joined = self.code.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in joined if not line.endswith("&")]
        return [found for found in words if found]


def page_names():
    """The pages: the README, and all that lie below docs/ by their path there."""
    return [README, *sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))]


def read_page(name):
    return (ROOT if name == README else DOCS).joinpath(name).read_text(encoding="utf-8")


def blocks(name):
    """The blocks of a page in languages that can be run."""
    return [
        Block(match["language"], match["code"], match["reason"])
        for match in BLOCK.finditer(read_page(name))
        if match["language"] in LANGUAGES
    ]


def arguments_of(words):
    """The arguments of ``jaxformer`` in a command; None if it is another command."""
    words = list(words)
    if words[:2] == ["uv", "run"]:
        words = words[2:]
        while words[0] in ("--extra", "--group"):
            words = words[2:]
    if words[0] == "train.py":
        return ["train", *words[1:]]
    return words[1:] if words[0] == "jaxformer" else None
