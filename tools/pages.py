"""A Sphinx extension for what a page of this book does in the reader's browser, and what it leaves out.

- The directive ``instrument`` puts a recording of ``book/_static/instruments`` into the page, with a still picture of it
  for readers without JavaScript and for print. ``book/_static/book.js`` makes it move.
- The directive ``question`` asks something that takes two minutes, and keeps the answer folded.
- A step's code cell shows what it changes: lines that the most similar function before it does not have are highlighted.
  Folded is what an author marked, from ``# region WORDS`` to ``# endregion``, by ``book.js``.
- Exercises and detours at first show their headings only.
- Long names may break after their underscores and points, and so nowhere else in a table's narrow columns.
- Terms of the glossary carry their definition to the page on which they are used.
- The search index holds the text and not the code of cells.
- Pictures that outputs bring with them become files, so that a page with tabs is not as heavy as all its tabs.
- Scripts that no page needs are left out: a notebook server's client, the search index on every page, and 1,500 kB of icons of which a dozen are used.
"""

import ast
import base64
import difflib
import hashlib
import html
import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

GLOSSARY = "book/notation"
RECORDINGS = Path(__file__).resolve().parent.parent / "book" / "_static" / "instruments"
SIMILAR = 0.6  # of two functions: below it, one is another one and not the next step

# What only puts a figure into the text, and remarks to tools that format and check: no reader's.
UNSHOWN = re.compile(
    r"^plots\.glue\(.*\)\n?|^# isort: split\n|  # (?:fmt: skip|noqa|type: ignore)(?::? ?[\w, \[\]-]*)?$", re.MULTILINE
)
DRAWING = re.compile(r'<img\b[^>]*?\bsrc="((?:\.\./)*_images/([\w-]+\.svg))"[^>]*>')
VIEW = re.compile(r'<view id="(phone-\d+)" viewBox="\S+ \S+ (\S+) (\S+)"')
FITS = 840  # pixels of a chart whose letters are legible on a phone, too
EMBEDDED = re.compile(r'<img ([^>]*)src="data:image/png;base64,([^"]+)"')
INLINE_CODE = re.compile(r"(<code\b[^>]*>)(.*?)(?=</code>)", re.DOTALL)
CELL, LABEL_WIDTH = 26, 92  # of a still picture, in its units


def _code(source: str) -> list[str]:
    """The lines without indentation, remarks and the names of kernels: a line that moved into a loop is no other line."""
    source = re.sub(r"\b_\w+_kernel\b", "_kernel", source)
    source = re.sub(r"^def \w+", "def f", source, flags=re.MULTILINE)
    return [re.sub(r"\s*#.*", "", line).strip() for line in source.splitlines()]


def changed_lines(source: str, earlier: list[str]) -> set[int]:
    """The lines of a function, from 1 on, that the most similar of the ``earlier`` ones does not have; none if none is similar."""
    after = _code(source)
    matchers = [difflib.SequenceMatcher(None, _code(before), after, autojunk=False) for before in earlier]
    best = max(reversed(matchers), key=lambda matcher: matcher.ratio(), default=None)
    if best is None or best.ratio() < SIMILAR:
        return set()
    found = [range(low + 1, high + 1) for kind, _, _, low, high in best.get_opcodes() if kind != "equal"]
    return {line for lines in found for line in lines if after[line - 1]}


def functions(source: str) -> list[tuple[int, str]]:
    """The functions at the top of a cell, each with its first line, from 1 on, and its source with decorators."""
    lines, found = source.splitlines(), []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.append((first, "\n".join(lines[first - 1 : node.end_lineno])))
    return found


def marked_lines(source: str) -> set[int]:
    """The lines that say "# New", from 1 on, and behind a remark that stands alone what it is a remark on."""
    lines, found = source.splitlines(), set()
    for mark, line in enumerate(lines):
        if "# New" not in line:
            continue
        end = mark
        if line.lstrip().startswith("#"):
            end = next((i for i in range(mark, len(lines)) if not re.match(r"\s*(#|$)", lines[i])), mark)
            code = [re.sub(r"#.*", "", line) for line in lines[end:]]
            ends = accumulate(sum(map(line.count, "([{")) - sum(map(line.count, ")]}")) for line in code)
            end += next((i for i, depth in enumerate(ends) if depth <= 0), 0)
        found |= set(range(mark + 1, end + 2))
    return found


def highlighted(source: str, earlier: list[str]) -> list[int]:
    """The lines of a cell that are new in its functions, where lines say so."""
    found = set()
    for first, text in functions(source):
        if "# New" in text:
            found |= {first - 1 + line for line in marked_lines(text) | changed_lines(text, earlier)}
    return sorted(found)


def mark_changes(app: Any, doctree: nodes.document, docname: str) -> None:
    """Highlights, in functions that mark lines as new, what the most similar function before does not have.

    Lines that hand a number to the text of the page, and remarks to tools that format and check, are no part of the lesson:
    they are left out, of listings too.
    """
    earlier: list[str] = []
    for block in doctree.findall(nodes.literal_block):
        text = UNSHOWN.sub("", block.astext()).rstrip("\n")
        if text != block.astext() and text:
            block.rawsource = text
            block.children[:] = [nodes.Text(text)]
        cell = isinstance(block.parent, nodes.container) and block.parent.get("nb_element") == "cell_code_source"
        if not cell or ("@triton.jit" not in text and "@gluon.jit" not in text):
            continue
        if lines := highlighted(text, earlier):
            block.setdefault("highlight_args", {})["hl_lines"] = lines
        earlier += [source for _, source in functions(text)]


def _definitions(app: Any) -> dict[str, str]:
    """The glossary as text, by the id of each term."""
    found = {}
    for item in app.env.get_doctree(GLOSSARY).findall(nodes.definition_list_item):
        definition = " ".join(item.next_node(nodes.definition).astext().split())
        for term in item.findall(nodes.term):
            found |= dict.fromkeys(term["ids"], definition)
    return found


def still_picture(recording: dict[str, Any]) -> str:
    """The last frame of a recording's first run as an SVG: what is seen without JavaScript, and in print."""
    run = recording["runs"][0]
    panels, height = [], 8
    for panel in recording["panels"]:
        cells = ["."] * (panel["rows"] * panel["columns"])
        texts = [""] * len(cells)
        for frame in run["frames"]:
            for name, start, codes, *words in frame.get("set", []):
                if name == panel["name"]:
                    cells[start : start + len(codes)] = codes
                    for i, word in enumerate(words[0] if words else []):
                        texts[start + i] = word
        panels.append(f'<text x="0" y="{height + 17}" class="name">{html.escape(panel["label"])}</text>')
        size = min(CELL, (640 - LABEL_WIDTH) / panel["columns"])
        for i, (code, word) in enumerate(zip(cells, texts, strict=True)):
            x = LABEL_WIDTH + i % panel["columns"] * size
            y = height + i // panel["columns"] * size
            kind = "none" if code == "." else code
            square = f'x="{x:.1f}" y="{y:.1f}" width="{size - 2:.1f}" height="{size - 2:.1f}" rx="3"'
            panels.append(f'<rect {square} class="c-{kind}"/>')
            if word:
                middle = f'x="{x + size / 2 - 1:.1f}" y="{y + size / 2 + 3:.1f}"'
                panels.append(f'<text {middle} class="word">{html.escape(word)}</text>')
        height += round(panel["rows"] * size) + 12
    facts = "; ".join(f"{name}: {value}" for name, value in run["facts"].items())
    title = f"<title>{html.escape(recording['title'])}</title><desc>{html.escape(facts)}</desc>"
    return f'<svg viewBox="0 0 640 {height}" role="img">{title}{"".join(panels)}</svg>'


class Instrument(SphinxDirective):
    """``{instrument} name``: the recording ``name``; the content is its caption."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        path = RECORDINGS / f"{name}.json"
        if not path.exists():
            raise self.error(f"instrument: {path.name} is not recorded; tools/record_instruments.py makes it")
        self.env.note_dependency(str(path))
        text = path.read_text(encoding="utf-8")
        recording = json.loads(text)
        box = nodes.container(classes=["instrument"], ids=[f"instrument-{name.replace('_', '-')}"])
        runs = "".join(
            f"<tr><th scope='row'>{html.escape(run['name'])}</th>"
            + "".join(f"<td>{html.escape(str(value))}</td>" for value in run["facts"].values())
            + "</tr>"
            for run in recording["runs"]
        )
        head = "".join(f"<th scope='col'>{html.escape(fact)}</th>" for fact in recording["runs"][0]["facts"])
        control = html.escape(recording["control"])
        still = (
            f'<div class="still">{still_picture(recording)}<div class="still-table"><table class="table"><thead><tr>'
            f"<th scope='col'>{control}</th>{head}</tr></thead><tbody>{runs}</tbody></table></div></div>"
        )
        data = text.replace("</", "<\\/")
        raw = f'{still}<script type="application/json" class="recording">{data}</script>'
        box += nodes.paragraph("", recording["title"], classes=["instrument-title"])
        box += nodes.raw("", raw, format="html")
        self.state.nested_parse(self.content, self.content_offset, box)
        return [box]


class Question(SphinxDirective):
    """``{question}``: what is asked, a line ``---``, and the answer, which is folded."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        lines = list(self.content)
        if "---" not in lines:
            raise self.error("question: expected a line '---' before the answer")
        middle = lines.index("---")
        box = nodes.container(classes=["question"])
        box += nodes.paragraph("", "Two minutes", classes=["question-title"])
        self.state.nested_parse(self.content[:middle], self.content_offset, box)
        box += nodes.raw("", "<details><summary>Answer</summary>", format="html")
        self.state.nested_parse(self.content[middle + 1 :], self.content_offset + middle + 1, box)
        box += nodes.raw("", "</details>", format="html")
        return [box]


FOLDED = re.compile(r"Exercises$|A detour")


def fold_sections(app: Any, doctree: nodes.document, docname: str) -> None:
    """Puts what is under some headings of a chapter into ``details``."""
    for section in list(doctree.findall(nodes.section)) if docname.startswith("notebooks/") else []:
        title = section.next_node(nodes.title)
        if title is None or title.parent is not section or not FOLDED.match(title.astext()):
            continue
        place = section.index(title) + 1
        count = len(list(section.findall(lambda node: node.tagname == "exercise_enumerable_node")))
        what = f"Show the {count} exercises" if count else "Show this section"
        section.insert(place, nodes.raw("", f'<details class="section"><summary>{what}</summary>', format="html"))
        section.append(nodes.raw("", "</details>", format="html"))


def with_breaks(body: str) -> str:
    """A page whose inline code says where a line may end: behind an underscore or a point within a name."""

    def breakable(match: re.Match[str]) -> str:
        parts = re.split(r"(<[^>]*>)", match[2])
        parts[::2] = [re.sub(r"(?<=\w)([_.])(?=[A-Za-z])", r"\1<wbr>", part) for part in parts[::2]]
        return match[1] + "".join(parts)

    return INLINE_CODE.sub(breakable, body)


def _on_page(app: Any, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if doctree is None:
        return
    body = context["body"] = with_breaks(context.get("body") or "")
    if pagename == GLOSSARY:
        return
    if not hasattr(app.env, "kernelbook_definitions"):
        app.env.kernelbook_definitions = _definitions(app)
    used = sorted(set(re.findall(r"notation\.html#(term-[\w-]+)", body)))
    terms = {name: app.env.kernelbook_definitions[name] for name in used if name in app.env.kernelbook_definitions}
    if terms:
        data = json.dumps(terms, ensure_ascii=False).replace("</", "<\\/")
        context["body"] = f'{body}<script type="application/json" id="book-terms">{data}</script>'


def _text_only_index(app: Any) -> None:
    """The builder's search index is fed pages without the code of cells, and without what the cells print."""
    if not hasattr(app.builder, "index_page"):
        return
    feed = app.builder.index_page

    def index_page(pagename: str, doctree: nodes.document, title: str) -> None:
        text = doctree.deepcopy()
        for block in list(text.findall(nodes.literal_block)):
            block.parent.remove(block)
        feed(pagename, text, title)

    app.builder.index_page = index_page


UNUSED = re.compile(
    r"[ \t]*<script[^>]*>\s*const THEBE_JS_URL.*?</script>\n?"
    r'|[ \t]*<script[^>]*src="[^"]*sphinx-thebe\.js[^"]*"></script>\n?'
    r'|[ \t]*<link[^>]*href="[^"]*sphinx-thebe\.css[^"]*"[^>]*>\n?'
    r'|[ \t]*<script type="text/x-thebe-config">.*?</script>\n?',
    re.DOTALL,
)
SEARCH = re.compile(r'[ \t]*<script src="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*"></script>\n?')
ICON = re.compile(r"\bfa-([a-z][a-z0-9-]*)")


def _icons(scripts: Path, names: set[str]) -> str:
    """A style sheet with the shapes of the icons ``names``, cut out of the theme's script."""
    source = scripts.read_text(encoding="utf-8")
    rules = [
        ".fa-solid,.fa-regular,.fa-brands,.fas,.far,.fab{display:inline-block;width:1em;height:1em;vertical-align:-.125em;"
        "background:currentColor;-webkit-mask:var(--icon) center/contain no-repeat;mask:var(--icon) center/contain no-repeat}"
        ".fa-lg{font-size:1.25em}"
    ]
    for name in sorted(names):
        if found := re.search(rf'[{{,]"?{re.escape(name)}"?:\[(\d+),(\d+),\[[^\]]*\],"[^"]*","([^"]+)"\]', source):
            width, height, path = found.groups()
            svg = f"%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}'%3E%3Cpath d='{path}'/%3E%3C/svg%3E"
            rules.append(f'.fa-{name}{{--icon:url("data:image/svg+xml,{svg}")}}')
    return "\n".join(rules)


def with_files(text: str, page: Path, out: Path) -> str:
    """A page whose embedded pictures are files beside the others, which a browser loads when they are looked at."""

    def moved(match: re.Match[str]) -> str:
        data = base64.b64decode(match[2])
        name = f"{hashlib.sha256(data).hexdigest()[:20]}.png"
        (out / "_images").mkdir(exist_ok=True)
        (out / "_images" / name).write_bytes(data)
        root = "../" * (len(page.relative_to(out).parts) - 1)
        fits = 'class="fits" ' if 0 < int.from_bytes(data[16:20], "big") <= FITS and "class=" not in match[1] else ""
        return f'<img loading="lazy" {fits}{match[1]}src="{root}_images/{name}"'

    return EMBEDDED.sub(moved, text)


def with_views(text: str, out: Path) -> str:
    """A page with the parts of its wide drawings, which a phone shows below one another instead of the whole.

    A drawing names its parts itself: ``<view id="phone-1" viewBox="0 0 290 276"/>``. One that is narrow is shown as a whole.
    """

    def parted(match: re.Match[str]) -> str:
        drawing = out / "_images" / match[2]
        text = drawing.read_text(encoding="utf-8") if drawing.exists() else ""
        views = VIEW.findall(text)
        parts = "".join(
            f'<img class="phone-view" alt="" loading="lazy" src="{match[1]}#{name}" '
            f'style="width: min(100%, {1.15 * float(width):.0f}px); aspect-ratio: {width} / {height}">'
            for name, width, height in views
        )
        narrow = re.search(r'<svg[^>]*viewBox="0 0 (\d+)', text)
        fits = "" if narrow is None or int(narrow[1]) > FITS // 2 or "class=" in match[0] else ' class="fits"'
        return match[0].replace("<img", f"<img{fits}", 1) + parts

    return DRAWING.sub(parted, text)


def _lighten(app: Any, exception: Exception | None) -> None:
    """Takes out of the built pages what they do not use."""
    if exception is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    used: set[str] = set()
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        used |= set(ICON.findall(text))
        parts = UNUSED.sub("", text)
        if page.name != "search.html":
            parts = SEARCH.sub("", parts)
        parts = parts.replace(' role="list" class="citation-list"', ' class="citation-list"')  # its items are none
        parts = with_views(with_files(parts, page, out), out)
        # A script sets the theme that a reader wants; without scripts code would have no colours.
        parts = parts.replace(' data-theme="auto"', "")
        parts = parts.replace(' lang="en" data-content_root', ' lang="en" data-theme="light" data-content_root')
        page.write_text(parts, encoding="utf-8")
    script = out / "_static" / "scripts" / "fontawesome.js"
    if script.exists():
        style = out / "_static" / "book.css"
        style.write_text(style.read_text(encoding="utf-8") + _icons(script, used), encoding="utf-8")
        script.write_text("// The icons that pages use are in book.css.\n", encoding="utf-8")
        Path(f"{script}.map").unlink(missing_ok=True)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("instrument", Instrument)
    app.add_directive("question", Question)
    app.connect("builder-inited", _text_only_index)
    app.connect("doctree-resolved", mark_changes)
    app.connect("doctree-resolved", fold_sections)
    app.connect("html-page-context", _on_page)
    app.connect("build-finished", _lighten, priority=900)  # after static files are in place
    return {"parallel_read_safe": True, "parallel_write_safe": True}
