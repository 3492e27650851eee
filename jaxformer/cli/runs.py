"""``jaxformer runs``: options, and what is printed or drawn of training runs."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from jaxformer.cli.arguments import Switch, parse
from jaxformer.errors import CheckpointError, ResourceError, UsageError, as_flag
from jaxformer.hardware.invocation import install

if TYPE_CHECKING:
    from jaxformer.inspection.runs import RunSummary


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """List training runs with their state, or compare those that are named.

    One folder is searched for runs. Two runs or more are compared: the settings in which they
    differ, their losses, and with --out a picture of their loss curves.
    """

    paths: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """A folder with runs, or two runs or more."""
    out: Path | None = None
    """The picture of the loss curves to write, .png, .svg or .pdf."""
    json: Switch = False
    """Print JSON."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.out is not None and self.out.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--out must end in .png, .svg or .pdf: got {self.out}")
        if not self.paths:
            raise ValueError("give a folder with runs, or two runs or more")


def run(arguments: Sequence[str]) -> int:
    """Prints the runs of a folder, or compares those that are named; returns the exit code.

    A run of a folder that cannot be read is one line on standard error, and the others are printed.

    Raises:
        UsageError: a folder is missing or holds no run, or matplotlib is missing.
        CheckpointError: a run that is named cannot be read.
        ResourceError: the picture cannot be written.
    """
    options: RunsOptions = parse(RunsOptions, "jaxformer runs", arguments)
    if options.out is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"a picture needs matplotlib: {install('plot')}")

    from jaxformer.inspection.runs import different_settings, find_runs, read_run
    from jaxformer.inspection.runs_table import print_differences, print_runs

    # A folder that is named twice is one run.
    folders = dict.fromkeys(run for path in options.paths for run in find_runs(path))
    if not folders:
        raise UsageError(f"{', '.join(map(str, options.paths))}: there is no run in it")
    found, code = [], 0
    for folder in folders:
        try:
            found.append(read_run(folder))
        except CheckpointError as error:
            if folder in options.paths:
                raise
            code = error.exit_code
            print(f"jaxformer: {error.message(as_flag)}", file=sys.stderr)
    if not found:
        return code
    different = different_settings(found) if len(options.paths) > 1 else {}
    if options.json:
        facts: dict[str, Any] = {"runs": [each.to_dict() for each in found]}
        if len(options.paths) > 1:
            facts["different_settings"] = different
        print(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        print_runs(found)
        if len(options.paths) > 1:
            print_differences(found, different)
    if options.out is not None:
        _draw(found, options.out)
        if not options.json:
            print(options.out)
    return code


def _draw(runs: "Sequence[RunSummary]", path: Path) -> None:
    from jaxformer.inspection.charts import losses_of_runs

    figure = losses_of_runs(
        {str(r.folder): (r.curve("train_loss"), r.curve("val_loss")) for r in runs}
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from error
