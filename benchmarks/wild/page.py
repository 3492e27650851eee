"""The page docs/reference/wild.md, from what docs/reference/wild.json says."""

import collections

from benchmarks.wild.checked import CHECKED

MODES = ("forward", "padding right", "padding left", "cache", "cache, padding left")
HEAD = """# In the wild: JAX models that other people published

`jaxformer.compare(torch_model, jax_model, inputs)` was called on {families} families of models of
{libraries} public packages, each against the PyTorch model whose weights it reads. No names were
given, and nothing was changed in the packages. {bugs} of {comparisons} comparisons found a
difference that is no rounding.

This is how the page was made, on {date}:

<!-- not run: takes an hour, and installs other packages; a test of the slow tier makes a part -->
```sh
{command}
```

It makes three environments with uv, outside the repository, and installs {versions}.

- The models are small, their weights random, and every trained weight differs from its first value.
  So nothing is downloaded, and no weight hides a bug by being zero or one.
- Texts are 9 tokens long; the second of two is padded by 3 tokens. With a cache, the models
  read 6 tokens and then one at a time.
- The Flax models of transformers were written for an older JAX. The script gives
  `jax.numpy.clip` its old keywords `a_min` and `a_max` again; nothing else is changed. They are
  loaded with `from_pretrained(folder, from_pt=True)`. PyTorch's attention is `eager`.
- What is computed at padding, and read by nobody, is not counted.

## Results

*Equal* means equal in float64, but for numbers and tables that either side rounds to float32. A
number is the largest difference of the results over their largest number, in float32, as people run
the models, without the debugger: it does not depend on jaxformer.
*Incomplete* and *failed* are explained below.
"""


def page(data):
    """Returns the page.

    Args:
        data: of docs/reference/wild.json: how it was made, and its rows.
    """
    rows = data["rows"]
    parts = [HEAD.format(
        families=len({(r["library"], r["family"]) for r in rows}),
        libraries=len({r["library"] for r in rows}),
        bugs=sum(r["verdict"] == "bug" for r in rows),
        comparisons=sum(r["verdict"] != "failed" for r in rows),
        **data["made"],
    )]  # fmt: skip
    parts += [*_revisions(rows), ""]
    for library in dict.fromkeys(r["library"] for r in rows):
        own = [r for r in rows if r["library"] == library]
        parts += [f"### {library}\n", *_table(own), ""]
    parts += ["## Root causes\n", *_causes(rows), ""]
    parts += ["## What could not be compared\n", *_failures(rows), ""]
    parts += [
        "## Two of them as scripts\n",
        "Each runs by itself, prints both numbers, and shows the line that mends it:\n",
        "- [electra_token_types.py](wild/electra_token_types.py): `FlaxElectra` reads "
        "another token type where none is given.",
        "- [llama_rotary_base.py](wild/llama_rotary_base.py): `FlaxLlama` ignores "
        "`rope_theta` and `rope_scaling`.",
    ]
    return "\n".join(parts) + "\n"


def _revisions(rows):
    """Yields which revision of jaxformer measured how many rows, and which rows are older."""
    counts = collections.Counter(row.get("revision", "") for row in rows)
    known = [f"{count} rows at {name}" for name, count in counts.items() if name]
    yield f"Measured by jaxformer at these revisions: {', '.join(known) or 'none is known'}."
    if counts[""]:
        old = [r for r in rows if not r.get("revision")]
        listed = dict.fromkeys(f"{r['family']} ({r['mode']})" for r in old)
        yield (
            f"{counts['']} rows are of 23 November 2026, measured while compare was improved: "
            f"{', '.join(listed)}."
        )


def _table(rows):
    modes = [m for m in MODES if any(r["mode"] == m for r in rows)]
    yield f"| family | setting | {' | '.join(modes)} |"
    yield "|" + "---|" * (2 + len(modes))
    for family, setting in dict.fromkeys((r["family"], r["setting"]) for r in rows):
        found = {r["mode"]: r for r in rows if (r["family"], r["setting"]) == (family, setting)}
        cells = [_cell(found[mode]) if mode in found else "" for mode in modes]
        yield f"| {family} | {setting} | {' | '.join(cells)} |"


def _cell(row):
    if row["verdict"] in ("exact", "rounding"):
        return "equal"
    if row["verdict"] == "bug":
        return f"**{row['effect']:.0e}**" if row["effect"] is not None else "**differs**"
    return row["verdict"]


def _causes(rows):
    """Yields each line of a package that is wrong, with what is wrong, most severe first."""
    found = {}
    for row in rows:
        for cause in row.get("causes", ()):
            key = row["library"], row["family"], cause["jax"], cause["diagnosis"], cause["torch"]
            found.setdefault(key, []).append((row, cause))
        for text in row.get("weights", ()):
            key = row["library"], row["family"], "", text, ""
            found.setdefault(key, []).append((row, {"effect": None, "error": 0.0}))

    def effect(places):
        return max(c["error"] if c["effect"] is None else c["effect"] for _, c in places)

    ordered = sorted(found.items(), key=lambda item: (item[0][0], -effect(item[1])))
    library = None
    for (name, family, jax, diagnosis, torch), places in ordered:
        if name != library:
            library = name
            yield from ("", f"### {name}\n") if places else ()
        settings = dict.fromkeys(f"{r['setting']} ({r['mode']})" for r, _ in places)
        listed = "; ".join(list(settings)[:4]) + ("; …" if len(settings) > 4 else "")
        size = f"moves the results by {effect(places):.0e} of their scale"
        text = diagnosis or "the segments differ; no known substitution mends it"
        yield f"- **{family}**: {text}; {size}."
        if jax:
            yield f"  `{jax}` against `{torch}`."
        yield f"  Seen with: {listed}."
        checked = CHECKED.get((name, jax))
        yield f"  Checked by hand: {checked}" if checked else "  Not checked by hand."


def _failures(rows):
    found = {}
    for row in rows:
        if row["verdict"] == "failed":
            text = f"{row['reason']} ({', '.join(row['where']) or 'in the script'})"
        elif row["verdict"] == "incomplete":
            text = row["incomplete"][0]
        else:
            continue
        key = row["library"], row["family"], row["verdict"], text
        found.setdefault(key, []).append(f"{row['setting']} ({row['mode']})")
    if not found:
        yield "Nothing."
    for (library, family, verdict, text), places in found.items():
        places = list(dict.fromkeys(places))
        listed = "; ".join(places[:3]) + ("; …" if len(places) > 3 else "")
        yield f"- {library}, {family}: {verdict}, {text}. {listed}."
