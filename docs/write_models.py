"""Writes docs/reference/models.md: the model types of Hugging Face, and what was measured.

    uv run --group test python docs/write_models.py               # what is new
    uv run --group test python docs/write_models.py llama gpt2    # these types once more
    uv run --group test python docs/write_models.py --check       # fail where it is out of date

The measures are kept in docs/reference/models.json, and what is declared of the types, which
``jaxformer port --list`` prints, in jaxformer/porting/model_types.json. Measures that tests have
saved are not measured again: JAXFORMER_FIGURES names their folder.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import conftest  # noqa: E402, F401  sets JAX up before it is imported
from tests.support.hugging_face import table  # noqa: E402
from tests.support.hugging_face.cases import ALL_CASES  # noqa: E402


def main() -> int:
    """Writes the page and its tables, or says what is out of date."""
    if sys.argv[1:] == ["--check"]:
        stale = table.out_of_date()
        for line in stale:
            print(f"out of date: {line}", file=sys.stderr)
        if stale:
            print("run: uv run --group test python docs/write_models.py", file=sys.stderr)
        return 1 if stale else 0
    import jax
    import torch

    torch.set_num_threads(1)
    again, known, saved = set(sys.argv[1:]), table.read_measures(), table.saved_measures()
    types = json.loads(table.DECLARED.read_text("utf-8")) if table.DECLARED.exists() else {}
    measures = {}
    with jax.enable_x64(True):
        for name, case in ALL_CASES.items():
            measures[name] = saved.get(name, {})
            if case.dialect not in again and name in known and not measures[name]:
                measures[name] = known[name]
            if measures[name].keys() != {"outputs", "states", "gradients", "as_it_is", "tokens"}:
                measures[name] = table.measure(name)
                print(name, measures[name], flush=True)
                again.add(case.dialect)
        types = {
            name: table.declared(
                name,
                table.parts_of_dialect(name)
                if name in again or name not in types
                else types[name]["parts"],
            )
            for name in table.MODEL_TYPES
        }
    ordered = {
        n: measures[n] for d in table.MODEL_TYPES for n, c in ALL_CASES.items() if c.dialect == d
    }
    table.MEASURES.write_text(table.as_json(ordered), encoding="utf-8")
    table.DECLARED.write_text(table.as_json(types), encoding="utf-8")
    table.PAGE.write_text(table.page(ordered, types), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
