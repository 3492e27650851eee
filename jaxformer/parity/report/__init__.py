"""Reports: what a comparison found, and the forms in which it is shown and kept.

The comparisons of ``parity.comparison`` make a ``Report``. It leaves this package as lines in a
terminal, as a JSON file or as an HTML page; a JSON file is read back to see what got worse.

- ``report``: the whole report, its JSON form, and how it shows itself.
- ``text``: numbers, sentences and the verdict line, shared by all forms.
- ``tree``: the nodes as a tree, in which similar branches share a line.
- ``terminal``: prints a report.
- ``tables``: reports as tables of pandas.
- ``files``: writes and reads JSON files.
- ``regressions``: compares a report with an earlier one.
- ``html``: writes a page that needs no network.
"""
