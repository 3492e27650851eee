"""The HTML report: one page that a browser opens from the disk, without a network.

A ``Report`` enters; one self-contained HTML file leaves.

- ``writer``: the page's text: header, tree and tables, readable without scripts too.
- ``page_data``: the numbers that the page's script draws from, packed as JSON.
- ``attention_maps``: attention weights as small pictures.
- ``page/``: the template, its style sheet and its scripts.
"""
