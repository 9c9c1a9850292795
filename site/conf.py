"""Configure Sphinx: the site is made of the repository's own READMEs and notebooks, and needs no network.

    make site

The folder of sources is the repository itself. Notebooks are shown with the outputs that they have, and
nothing is executed. What is special about this repository (a README is the page of its folder, and links to
source files lead to pages that show them) is in repository.py beside this file.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = html_title = "The Distributed Training Workbook"
extensions = ["myst_nb", "mathml", "repository"]
root_doc = "index"

include_patterns = ["*.md", "*/*.md", "*/*/*.md", "lab/models/data/*.md", "notebooks/*.ipynb"]
exclude_patterns = [".*", "*/.*", "site/_build", "traces", "checkpoints", "runs", "shared"]

nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}  # scripts of other hosts
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 5
html_math_renderer = "mathml"

html_theme = "furo"
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_css_files = ["site.css"]
html_js_files = ["embed.js"]
html_show_sourcelink = html_copy_source = html_show_copyright = False
html_show_search_summary = False  # it would have to be fetched
pygments_style, pygments_dark_style = "default", "github-dark"
