"""A Sphinx extension for what a published book has beside its pages.

``404.html`` and ``llms.txt`` (what the pages are, for language models: llmstxt.org) are always written. With an address
(``BOOK_ADDRESS``, such as https://owner.github.io/name/, which the workflow in .github gives) come a site map, a line for
crawlers that names it, and in every page what social networks show of a link: title, description and a card.
"""

import html
import os
import re
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from docutils import nodes

CARD = "_static/card.png"


def _address(app: Any) -> str:
    """The address of the built book, with a slash at its end, or nothing."""
    address = str(app.config.html_baseurl)
    return f"{address.rstrip('/')}/" if address else ""


def description(doctree: nodes.document) -> str:
    """What the page says of itself: its description for search engines, or its first paragraph, as one line."""
    for meta in doctree.findall(nodes.meta):
        if meta.get("name") == "description":
            return str(meta["content"])
    for paragraph in doctree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if isinstance(paragraph.parent, nodes.section) and text:
            return text if len(text) <= 300 else text[:297].rsplit(" ", 1)[0] + "..."
    return ""


def _on_page(app: Any, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    address = _address(app)
    if doctree is None or not address:
        return
    title = re.sub(r"<[^>]+>", "", context.get("title") or app.config.html_title)
    tags = {
        "og:type": "website" if pagename == app.config.root_doc else "article",
        "og:site_name": app.config.html_title,
        "og:title": html.unescape(title),
        "og:description": description(doctree),
        "og:url": f"{address}{pagename}.html",
        "og:image": address + CARD,
        "twitter:card": "summary_large_image",
    }
    lines = "".join(f'<meta property="{name}" content="{html.escape(value)}" />\n' for name, value in tags.items())
    context["metatags"] = context.get("metatags", "") + lines


def _pages(app: Any) -> list[str]:
    """The pages in their order, and then those that are in no list of contents."""
    found = list(app.env.collect_relations())
    return found + sorted(set(app.env.all_docs) - set(found))


def llms(app: Any) -> str:
    """The list of pages for language models; their sources are Markdown and notebooks, which read better than HTML."""
    address = _address(app)
    root = app.env.get_doctree(app.config.root_doc)
    lines = [f"# {app.config.project}", "", f"> {description(root)}", "", "## Pages", ""]
    for page in _pages(app):
        title = app.env.titles[page].astext()
        source, added = Path(app.env.doc2path(page)).suffix, app.config.html_sourcelink_suffix
        source += added if added != source else ""
        about = description(app.env.get_doctree(page))
        lines.append(f"- [{title}]({address}_sources/{page}{source}): {about}".rstrip(": "))
    return "\n".join(lines) + "\n"


def not_found(app: Any) -> str:
    """A page for addresses that do not exist, which may be looked up in any folder."""
    home = _address(app) or "/"
    title = html.escape(str(app.config.html_title))
    links = "".join(
        f'<li><a href="{home}{page}.html">{html.escape(app.env.titles[page].astext())}</a></li>' for page in _pages(app)
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>No such page - {title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="robots" content="noindex">'
        "<style>body{font:17px/1.6 system-ui,sans-serif;max-width:40em;margin:10vh auto;padding:0 1em}"
        "html{color-scheme:light dark}</style></head><body><h1>There is no such page</h1>"
        f'<p>These there are in <a href="{home}">{title}</a>:</p><ul>{links}</ul></body></html>\n'
    )


def _on_finish(app: Any, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    out, address = Path(app.outdir), _address(app)
    (out / "404.html").write_text(not_found(app), encoding="utf-8")
    (out / "llms.txt").write_text(llms(app), encoding="utf-8")
    if not address:
        return
    urls = "".join(f"<url><loc>{escape(f'{address}{page}.html')}</loc></url>\n" for page in _pages(app))
    (out / "sitemap.xml").write_text(
        f'<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{urls}</urlset>\n',
        encoding="utf-8",
    )
    (out / "robots.txt").write_text(f"User-agent: *\nAllow: /\nSitemap: {address}sitemap.xml\n", encoding="utf-8")
    import first_figure

    first_figure.draw_card(out / CARD, str(app.config.project))


def _on_config(app: Any, config: Any) -> None:
    config.html_baseurl = config.html_baseurl or os.environ.get("BOOK_ADDRESS", "")


def setup(app: Any) -> dict[str, bool]:
    app.connect("config-inited", _on_config)
    app.connect("html-page-context", _on_page)
    app.connect("build-finished", _on_finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
