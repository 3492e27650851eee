"""``jaxformer plan``: what a run would take, as a table or as JSON."""

import json
import sys

from rich.console import Console
from rich.table import Table

from jaxformer.planning.needs import Needs, find_needs
from jaxformer.planning.options import PlanOptions
from jaxformer.planning.programs import compile_for_topology, compile_run, describe_topology
from jaxformer.training.corpora import load_corpus
from jaxformer.training.devices import describe_rate
from jaxformer.training.experiment import Experiment, choose_devices, run_as
from jaxformer.training.progress import describe_parameters


def plan(options: PlanOptions) -> None:
    """Prints what the run of ``options.config`` would take.

    Raises:
        JaxformerError: one of its kinds, for whatever training would refuse before its first step.
    """
    config = options.config
    if options.topology is None:
        devices = choose_devices(config)
    else:
        topology = describe_topology(options.topology)
        devices = list(topology.devices)
    corpus = load_corpus(config.data, encoding=config.encoding, download=options.download)
    experiment = Experiment.prepare(config, corpus)
    with run_as(config):
        programs = (
            compile_run(experiment, devices)
            if options.topology is None
            else compile_for_topology(experiment, topology)
        )
    needs = find_needs(experiment, devices, programs)
    if options.json:
        print(json.dumps(needs.to_dict(), indent=1))
        return
    _show(needs, Console(file=sys.stdout, highlight=False, soft_wrap=True))


def _show(needs: Needs, console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    here = f"compiled for {needs.devices} × {needs.device_kind}"
    size = describe_parameters(needs.parameter_count)
    table.add_row("parameters", _size(needs.parameters), f"{size}, float32")
    table.add_row("AdamW's moments", _size(needs.moments), "two for each parameter")
    if needs.corpus:
        table.add_row("corpus", _size(needs.corpus), "ids of the whole text")
    table.add_row("training", _size(needs.training), f"temporary, {here}; of it")
    table.add_row("  gradients", _size(needs.gradients), "one for each parameter")
    table.add_row("  activations", _size(needs.training - needs.gradients), "and all else")
    if needs.evaluation is not None:
        table.add_row("evaluation", _size(needs.evaluation), "temporary, never beside training's")
    table.add_row("each device", _size(needs.total), _verdict(needs))
    table.add_row("tokens", f"{needs.tokens_per_step:,}", "a step, over all devices")
    table.add_row("operations", f"{needs.operations_per_step:.3g}", "a step, in matrix products")
    if needs.peak:
        seconds = needs.operations_per_step / needs.peak
        limit = f"a step at the peak of {describe_rate(needs.peak)}"
        table.add_row("no faster than", f"{1000 * seconds:.3g} ms", limit)
    console.print(table)
    fits = needs.fits()
    for verdict in (True, False):
        names = [name for name, fitting in fits.items() if fitting == verdict]
        if names:
            words = "fits" if verdict else "does not fit"
            console.print(f"[dim]{words}[/]  {', '.join(names)}")


def _verdict(needs: Needs) -> str:
    if needs.capacity is None:
        return "of an unknown amount"
    fits = "fits" if needs.total <= needs.capacity else "[bold red]does not fit[/]"
    return f"of {_size(needs.capacity)}: {fits}"


def _size(count: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"
