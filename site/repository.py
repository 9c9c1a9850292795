"""Show a repository as a site: a README is the page of its folder, and a link to a source file shows it.

README.md, comm/README.md           index.html, comm/index.html
notebooks/02_collectives.ipynb      notebooks/02_collectives.html
a link to comm/tour.py              comm/tour.py.html, the highlighted file
a link to comm/algorithms           comm/algorithms/index.html, a list of its files
a link to a template in pages.py    the page to play with that is made of it
"""

import ast
import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.project import Project
from sphinx.transforms import SphinxTransform

from front import clone_of, first_page, lessons_of
from lab.notebook.prediction import NO_KEYBOARD
from lesson_pages import with_additions
from pages import PAGES, lessons, write_pages

# The menu's parts after the lessons: a title, and a pattern of pages, which stand where they match first.
MENU = (
    ("Notebooks", "notebooks/.*"),
    ("Pages to play with", "site/.*"),
    ("Exercises", "exercises/.*"),
    ("Handbook", "docs/.*"),
    ("More", ".*"),
)
ANSWER = "Predict first. Then look."
ACCOUNT = "YOUR_ACCOUNT"  # stands in addresses until notebooks/README.md's command sets it
COLAB = re.compile(r"try:\n    import lab\n.*?colab\.py\n\n", re.DOTALL)  # in the first cell of a notebook
# Source files of other kinds are shown as plain text.
LEXERS = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".cff": "yaml", ".html": "html", ".js": "js"}


class ReadmesAreIndexes(Project):
    """Names the README of a folder `index`, so that it becomes the folder's page."""

    def path2doc(self, filename: Any) -> str | None:
        name = super().path2doc(filename)
        return name and re.sub(r"(^|/)README$", r"\1index", name)


def menu(docnames: set[str], in_order: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the title of each part of the menu, and its pages; lessons are in their order."""
    left = sorted(docnames - {"index"}, key=lambda name: (not name.endswith("/index"), name))
    for title, *patterns in (("Lessons", *(f"{folder}/index" for folder in in_order)), *MENU):
        pages = []
        for pattern in patterns:
            pages += [name for name in left if re.fullmatch(pattern, name)]
            left = [name for name in left if name not in pages]
        if pages:
            yield title, pages


def change_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make the first page, which has the menu where Sphinx looks for it, and add to the pages of lessons."""
    readme = (Path(app.srcdir) / "README.md").read_text("utf-8")
    in_order = lessons_of(readme)
    folder, _, name = docname.partition("/")
    if name == "index" and folder in in_order:
        source[0] = with_additions(folder, source[0])
    if docname == "index":
        if "site/index" in app.project.docnames:
            source[0] = first_page(readme, (Path(app.srcdir) / "site" / "README.md").read_text("utf-8"))
        for title, pages in menu(app.project.docnames, in_order):
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n" + "\n".join(pages) + "\n```\n"


class LinksToSources(SphinxTransform):
    """Turns links to files and folders that have no page of their own into links to pages that show them."""

    default_priority = 5  # before Sphinx copies the files as downloads

    def apply(self, **kwargs: Any) -> None:
        docname = self.env.docname
        kinds = (addnodes.pending_xref, addnodes.download_reference)
        for link in [link for kind in kinds for link in self.document.findall(kind)]:
            path = (Path(self.env.doc2path(docname)).parent / link["reftarget"]).resolve()
            root = Path(self.env.srcdir).resolve()
            is_shown = link.get("reftype") == "myst" and not link.get("refdomain") and path.exists()
            is_picture = path.suffix in (".png", ".svg")  # Sphinx copies it
            if not is_shown or is_picture or not path.is_relative_to(root):
                continue
            page = page_of(self.env, path.relative_to(root).as_posix())
            uri = posixpath.relpath(page, posixpath.dirname(docname) or ".")
            link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True))


class Pictures(SphinxTransform):
    """Makes each picture a link to the file: on a narrow screen it is shown smaller than it is."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        for image in self.document.findall(nodes.image):
            if image["uri"].endswith(".png"):
                image["scale"] = 100  # Sphinx links pictures that have a scale


class NotebookCells(SphinxTransform):
    """Shows cells that run on ranks as Python, describes pictures in a text, and folds answers.

    Says how to run the notebook, and that a prediction is an example. Leaves out what is of no use on the
    site: links to an account that is not set, and how Colab fetches the workbook.
    """

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        if Path(self.env.doc2path(self.env.docname)).suffix == ".ipynb":
            self.say_how_to_run()
        self.fold_answers()
        for output in self.document.findall(
            lambda node: isinstance(node, nodes.container) and node.get("nb_element") == "mime_bundle"
        ):
            texts = [each.astext() for each in output if each.get("mime_type") == "text/plain"]
            for image in output.findall(nodes.image):
                image["alt"] = "".join(texts)
        for block in self.document.findall(nodes.literal_block):
            if block.astext().startswith("%%rank"):
                block["language"] = "python"
            shown = COLAB.sub("", block.astext()).replace(NO_KEYBOARD, "(an example guess)")
            if shown != block.astext():
                block.rawsource = shown
                block.children = [nodes.Text(shown)]
        for verdict in self.document.findall(nodes.raw):
            verdict.children = [nodes.Text(verdict.astext().replace(">predicted<", ">example guess<"))]
        for line in list(self.document.findall(nodes.paragraph)):
            if any(ACCOUNT in link.get("refuri", "") for link in line.findall(nodes.reference)):
                line.parent.remove(line)

    def say_how_to_run(self) -> None:
        clone = html.escape(clone_of((Path(self.env.srcdir) / "README.md").read_text("utf-8")))
        first, then = (f"<code class='literal'>{each}</code>" for each in (clone, "make notebooks"))
        said = f"<p>Here you read this notebook. To run it on your machine: {first}, then {then}.</p>"
        title = next(self.document.findall(nodes.title))
        title.parent.insert(1, html_of(said))

    def fold_answers(self) -> None:
        """Fold the outputs that answer a prediction: after the cell that asks, to the one that compares.

        What is said about the answer is folded with it: all up to the next heading, cell or question.
        """
        predicted: set[str] = set()
        for cell in self.document.findall(
            lambda node: isinstance(node, nodes.container) and node.get("nb_element") == "cell_code"
        ):
            source = "".join(each.astext() for each in cell[:1])
            outputs = [part for part in cell[1:] if part.astext().strip() or list(part.findall(nodes.image))]
            is_folded = bool(predicted and outputs)
            predicted |= set(re.findall(r"(\w+) = predict\(", source))
            predicted -= set(re.findall(r"(\w+)\.compare\(", source))
            if is_folded:
                cell.insert(1, html_of(f'<details class="answer"><summary>{ANSWER}</summary>'))
                for said in [] if predicted else self.after(cell):
                    said.parent.remove(said)
                    cell.append(said)
                cell.append(html_of("</details>"))

    @staticmethod
    def after(cell: nodes.Element) -> list[nodes.Node]:
        """Return what stands between a cell and the next heading, cell or question."""
        rest = cell.parent[cell.parent.index(cell) + 1 :]
        ends = (nodes.container, nodes.section)
        is_end = [isinstance(each, ends) or "Predict" in each.astext() for each in rest]
        return rest[: [*is_end, True].index(True)]


def html_of(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


def page_of(env: BuildEnvironment, path: str) -> str:
    """Return the address of the page that shows a file or folder, and note that the page is needed."""
    if (env.srcdir / path).is_dir():
        name = f"{path}/index"
        if name not in env.project.docnames:
            _shown(env).add(path)
        return f"{name}.html"
    if path in PAGES:
        return f"site/{PAGES[path]}"
    _shown(env).add(path)
    return f"{path}.html"


def _shown(env: BuildEnvironment) -> set[str]:
    if not hasattr(env, "workbook_shown"):
        env.workbook_shown = set()  # type: ignore[attr-defined]
    return env.workbook_shown  # type: ignore[attr-defined]


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the pages of all files and folders to which links lead."""
    root, shown = Path(app.srcdir), _shown(app.env)
    if "site/index" in app.project.docnames:
        shown |= lessons()
    for folder in [path for path in shown if (root / path).is_dir()]:
        files = [path for path in (root / folder).iterdir() if path.is_file() and path.suffix in LEXERS]
        links = [f'<a href="{file.name}.html">{file.name}</a> {summary(file)}' for file in sorted(files)]
        yield _page(app, f"{folder}/index", f"{folder}/", f"<ul><li>{'<li>'.join(links)}</ul>")
        shown |= {f"{folder}/{file.name}" for file in files}
    for path in sorted(path for path in shown if (root / path).is_file()):
        lexer = LEXERS.get(Path(path).suffix, "text")
        code = app.builder.highlighter.highlight_block((root / path).read_text("utf-8"), lexer)
        yield _page(app, path, path, code)


def _page(app: Sphinx, name: str, title: str, body: str) -> tuple[str, dict[str, Any], str]:
    """Return what Sphinx needs for a page: its name, its content, and its template."""
    parents = [f"{folder}/index" for folder in map(str, Path(title).parents) if folder != "."] + ["index"]
    above = next(docname for docname in parents if docname in app.env.titles)
    up = posixpath.relpath(f"{above}.html", posixpath.dirname(name) or ".")
    name_of = re.sub("([/_])", r"\1<wbr>", title)
    heading = f"<h1>{name_of}</h1><p>In <a href='{up}'>{html.escape(app.env.titles[above].astext())}</a></p>"
    return name, {"title": title, "body": heading + body}, "page.html"


def summary(path: Path) -> str:
    """Return the first paragraph of a Python file's docstring, as HTML."""
    docstring = ast.get_docstring(ast.parse(path.read_bytes())) if path.suffix == ".py" else None
    return html.escape((docstring or "").partition("\n\n")[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", use_readmes)
    app.connect("source-read", change_pages)
    app.connect("html-collect-pages", source_pages)
    app.connect("build-finished", add_pages)
    app.add_transform(LinksToSources)
    app.add_transform(NotebookCells)
    app.add_transform(Pictures)
    return {"parallel_read_safe": False, "parallel_write_safe": True}


def add_pages(app: Sphinx, failure: Exception | None) -> None:
    """Write the pages to play with beside the page that lists them."""
    if "site/index" in app.project.docnames and failure is None:
        write_pages(Path(app.outdir) / "site", root="..")


def use_readmes(app: Sphinx) -> None:
    app.project = app.env.project = ReadmesAreIndexes(app.srcdir, app.config.source_suffix)
