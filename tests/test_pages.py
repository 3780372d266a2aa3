"""Every built page in a browser, at two widths and in both themes. Skipped where the book or Chromium is missing."""

import functools
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
Axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
PAGES = sorted(str(path.relative_to(HTML)) for path in HTML.rglob("*.html")) if HTML.exists() else []
CONTENT = [page for page in PAGES if page.startswith(("book/", "notebooks/"))]
WIDTHS = (1400, 390)
THEMES = ("light", "dark")
# Of what a reader loads with a page: the page itself, scripts, styles, and not the figures.
MOST_BYTES = 1_500_000
MOST_PIXELS = 15_000  # of a chapter at the first width, folds closed
# These need more, each for the reason beside it. None may grow.
LONGER = {
    "layer_norm": 19_400,  # both passes, three ways to add over programs with a kernel each, and the race that a lock must prevent
    "moe_lora": 19_400,  # tiles, scattered rows, and LoRA fused and split: a kernel each, and the gradients
    "attention_forward": 19_100,  # six ideas from formulas to grouped heads, a kernel each; both instruments
    "attention_backward": 19_000,  # three gradients by one kernel with atomics and by two kernels, and a fair race between them
    "together": 15_300,  # a block, then a model: loaded, trained, measured, published in four bits, and checked
    "sparse_linear": 18_500,  # two gradients, each with its kernels, and the loop and the copies that they replace
}
# Sphinx puts the parts of a class between the terms and definitions of one list.
AXE: dict[str, Any] = {
    "resultTypes": ["violations"],
    "preload": False,
    "rules": {"definition-list": {"enabled": False}},
}
AXE["runOnly"] = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
CONTRAST = AXE | {"runOnly": ["color-contrast", "link-in-text-block"]}
# Functions of the package are documented alike.
ALIKE = [["pre"], ["dl.py:nth-of-type(n+4)"], ["dl.py dl.py:nth-of-type(n+4)"]]
# Axe takes seconds for thousands of nodes: code has a word a node, and is looked at by itself on one page; rows of a table are alike.
THINNED = """() => {
    for (const pre of document.querySelectorAll('.bd-article pre')) pre.textContent = pre.textContent.slice(0, 80);
    for (const row of document.querySelectorAll('.bd-article tbody tr:nth-child(n+4)')) row.remove();
    for (const math of [...document.querySelectorAll('.bd-article math')].slice(3)) math.remove();
    for (const button of [...document.querySelectorAll('.bd-article .copybtn')].slice(3)) button.remove();
    for (const hidden of document.querySelectorAll('.instrument .still')) hidden.remove();
}"""
# One of all that look alike: their letters and those around them, on the same backgrounds.
ONE_OF_A_KIND = """() => {
    const letters = element => {
        const s = getComputedStyle(element);
        return [s.color, s.fontSize, s.fontWeight, s.textDecorationLine, s.display];
    };
    const under = element => {
        if (!element) return '';
        const s = getComputedStyle(element);
        return under(element.parentElement) + [s.backgroundImage, s.backgroundColor, s.opacity, s.position].join();
    };
    const seen = new Set();
    for (const element of document.querySelectorAll('.bd-article *')) {
        if (element.childElementCount) continue;
        const kind = [element.localName, letters(element), letters(element.parentElement), under(element)].join();
        if (seen.has(kind)) element.remove();
        seen.add(kind);
    }
}"""

pytestmark = [
    pytest.mark.skipif(not PAGES, reason="there is no built book: 'make book' comes first"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)"),
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(HTML)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync"
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=flags.split())
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def context(browser: Any) -> Any:
    """For pages that are opened one after the other: what they share is loaded once."""
    return browser.new_context(has_touch=True, reduced_motion="reduce", color_scheme="light")


def opened(browser: Any, url: str, width: int = 1400, theme: str = "light", **context: Any) -> tuple[Any, list[str]]:
    """The page, in a context of its own, and what it complained of."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, **context)
    return opened_in(context, url, theme)


def opened_in(context: Any, url: str, theme: str = "light") -> tuple[Any, list[str]]:
    page = context.new_page()
    page.add_init_script(f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}')")
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "response", lambda answer: complaints.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None
    )
    page.goto(url)  # until everything that the page names is loaded
    return page, complaints


def serious_faults(page: Any, options: dict[str, Any], context: dict[str, Any]) -> list[str]:
    faults = Axe().run(page, context=context, options=options).response["violations"]
    return [f"{f['id']}: {f['nodes'][0]['html'][:160]}" for f in faults if f["impact"] in ("serious", "critical")]


OVERFLOWING = """() => [...document.querySelectorAll('.bd-article *')].filter(e => {
    const box = e.getBoundingClientRect();
    if (box.width === 0 || box.right <= innerWidth + 1) return false;
    for (let p = e; p; p = p.parentElement) if (getComputedStyle(p).overflowX !== 'visible') return false;
    return true;
}).slice(0, 3).map(e => e.outerHTML.slice(0, 120))"""
LOADED = """() => performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))
    .map(entry => [entry.name, entry.decodedBodySize])"""


def set_theme(page: Any, theme: str) -> None:
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")


@pytest.mark.parametrize("page_name", CONTENT)
def test_a_page(context: Any, address: str, page_name: str) -> None:
    """No error, nothing too wide, accessible and light, at both widths and in both themes; instruments answer."""
    page, complaints = opened_in(context, address + page_name)
    # What Python's warnings begin with, a figure and a number of NumPy that came as text, and roles that a cell's output does not know.
    assert not re.search(
        r"site-packages|ipykernel_[0-9]|&lt;Figure size|np\.(?:int|float)64\(|\{(?:doc|ref|term|glue:text)\}",
        page.content(),
    )
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for theme in THEMES:
            set_theme(page, theme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{width} pixels, {theme}"
            assert not page.evaluate(OVERFLOWING), f"{width} pixels, {theme}"
        if width == WIDTHS[0] and page_name.startswith("notebooks/"):
            assert page.evaluate("document.querySelector('.bd-article').scrollHeight") <= LONGER.get(
                Path(page_name).stem, MOST_PIXELS
            )
    loaded = {url: size for url, size in page.evaluate(LOADED) if re.search(r"\.(html|js|css)(\?|$)", url)}
    assert len(loaded) > 3
    assert sum(loaded.values()) < MOST_BYTES, sorted(((size, url) for url, size in loaded.items()), reverse=True)[:6]
    assert not [url for url in loaded if "searchindex" in url or "thebe" in url]
    for way in ("mouse", "keyboard", "touch") if page.locator(".instrument").count() else ():
        if way != "mouse":  # a prediction is locked in once
            page.reload()
        for box in page.locator(".instrument").all():
            use_instrument(page, box, way)
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    page.evaluate(THINNED)
    article = {"include": [[".bd-article"]], "exclude": ALIKE}
    for theme, options in zip(THEMES, (AXE, CONTRAST), strict=True):
        set_theme(page, theme)
        if theme == "dark":  # where elements lie is known from the light one
            for _ in range(2):
                page.evaluate(ONE_OF_A_KIND)
        assert not serious_faults(page, options, article), theme
    assert not complaints
    page.close()


def test_only_what_an_author_marked_is_folded_and_it_unfolds(browser: Any, address: str) -> None:
    page, _ = opened(browser, address + "notebooks/matrix_product.html")
    marked = (ROOT / "notebooks" / "matrix_product.ipynb").read_text(encoding="utf-8").count("# region ")
    buttons = page.locator(".bd-article .unfold")
    assert buttons.count() == marked > 0
    cell = page.locator(".cell_input", has=page.locator(".unfold")).first
    height = cell.bounding_box()["height"]
    button = cell.locator(".unfold").first
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    assert cell.locator(".same").first.is_visible() and cell.bounding_box()["height"] > height + 40
    assert "c_ptr, stride_cm, stride_cn," in cell.inner_text()
    page.context.close()


def test_a_wide_table_is_blocks_on_a_phone(browser: Any, address: str) -> None:
    """Each cell under its column's name, and nothing to scroll to; on a desktop it stays a table."""
    page, _ = opened(browser, address + "notebooks/several_gpus.html", width=390)
    tables = page.locator(".bd-article table.blocks")
    assert tables.count() > 0
    for table in tables.all():
        assert table.bounding_box()["width"] <= 390
        heads = [text.strip() for text in table.locator("thead th").all_text_contents()]
        cells = table.locator("tbody tr:first-child :is(th, td):not(:first-child)")
        assert [cell.get_attribute("data-label") for cell in cells.all()] == heads[1:]
    page.set_viewport_size({"width": 1400, "height": 900})
    assert tables.first.locator("thead").is_visible()
    page.context.close()


def test_code_is_legible_in_both_themes(browser: Any, address: str) -> None:
    page, _ = opened(browser, address + "notebooks/first_kernel.html")
    for theme in THEMES:
        set_theme(page, theme)
        assert not serious_faults(page, CONTRAST, {"include": [["div.cell pre"]], "exclude": []}), theme
    page.context.close()


def test_every_link_inside_the_book_leads_somewhere() -> None:
    names: dict[Path, set[str]] = {}

    def anchors(path: Path) -> set[str]:
        if path not in names:
            names[path] = set(re.findall(r'\s(?:id|name)="([^"]+)"', path.read_text(encoding="utf-8")))
        return names[path]

    lost = []
    for page in PAGES:
        if page.startswith("_modules/"):  # sources, whose way back is Sphinx's guess
            continue
        text = (HTML / page).read_text(encoding="utf-8")
        for link in re.findall(r'<a [^>]*href="([^"]+)"', text):
            if re.match(r"[a-z]+:", link):
                continue
            target, anchor = urldefrag(urljoin(page, link.replace("&amp;", "&")))
            path = HTML / (unquote(target.partition("?")[0]).lstrip("/") or page)
            if not path.exists() or (anchor and path.suffix == ".html" and unquote(anchor) not in anchors(path)):
                lost.append(f"{page}: {link}")
    assert not lost


WITH_INSTRUMENTS = [page for page in CONTENT if 'class="instrument' in (HTML / page).read_text(encoding="utf-8")]


def use_instrument(page: Any, box: Any, way: str) -> None:
    def use(element: Any) -> None:
        if way == "mouse":
            element.click()
        elif way == "touch":
            element.tap()
        else:
            element.focus()
            page.keyboard.press("Space")

    assert box.locator(".still").is_hidden()
    assert box.locator(".player button").first.is_disabled()  # nothing before the prediction
    recording = json.loads(box.locator(".recording").text_content() or "")
    use(box.locator(".prediction input").first)
    use(box.locator(".commit"))
    settings = box.locator(".settings input")
    assert settings.nth(recording["asked"]).is_checked()  # what the question is about
    before = box.locator(".panels").inner_html()
    use(box.get_by_label("one step on"))
    if len(recording["runs"][recording["asked"]]["frames"]) > 2:  # else one step is the end
        assert not box.locator(".verdict").inner_text()
    use(box.locator(".play"))  # with reduced motion: straight to the end
    assert box.locator(".panels").inner_html() != before
    assert box.locator(".facts dd").count() > 0
    assert re.match("You were right|Not what you predicted", box.locator(".verdict").inner_text())
    assert box.locator(".beside tbody tr").count() == settings.count()
    other = settings.nth(0 if recording["asked"] else 1)
    use(other)
    assert other.is_checked()
    use(box.locator(".play"))
    slider = box.locator("input[type=range]")
    slider.focus()
    page.keyboard.press("Home")
    assert slider.input_value() == "0"
    assert re.match(r"1 of \d+", slider.get_attribute("aria-valuetext") or "")


def test_a_prediction_can_be_skipped(browser: Any, address: str) -> None:
    page, _ = opened(browser, address + WITH_INSTRUMENTS[0], reduced_motion="reduce")
    box = page.locator(".instrument").first
    box.locator(".skip").click()
    box.locator(".play").click()
    assert box.locator(".verdict").inner_text().startswith("The answer: ")
    page.context.close()


def test_the_look_up_narrows_and_sorts(browser: Any, address: str) -> None:
    page, complaints = opened(browser, address + "book/results.html")
    box = page.locator(".look-up")
    box.get_by_label("function").select_option("rms_norm")
    every = box.locator("tbody tr").count()
    box.get_by_label("shape or baseline").fill("N=4096")
    found = box.locator("tbody tr")
    assert 0 < found.count() < every
    assert all("N=4096" in text for text in found.all_inner_texts())
    box.get_by_label("shape or baseline").fill("")
    box.get_by_role("button", name="device").click()
    figures = [float(text) for text in box.locator("tbody td:nth-child(2)").all_inner_texts()]
    assert figures == sorted(figures, reverse=True)
    box.get_by_label("shape or baseline").fill("no such shape")
    assert "No point" in box.locator(".count").inner_text() and not complaints
    page.context.close()


def test_without_javascript_there_is_a_still_picture(browser: Any, address: str) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    assert len(WITH_INSTRUMENTS) >= 14
    for page_name in WITH_INSTRUMENTS:
        page.goto(address + page_name, wait_until="domcontentloaded")
        assert page.locator("html").get_attribute("data-theme") == "light"  # else code has no colours
        for box in page.locator(".instrument").all():
            assert box.locator(".still svg").is_visible()
            assert box.locator(".still table").is_visible()
    page.context.close()


def test_a_term_says_what_it_means(browser: Any, address: str) -> None:
    for way in ("mouse", "keyboard", "touch"):
        page, _ = opened(browser, address + "notebooks/first_kernel.html", has_touch=way == "touch")
        term = page.locator('.bd-article a[href*="notation.html#term-"]').first
        tip = page.locator("#term-tip")
        assert tip.is_hidden()
        if way == "mouse":
            term.hover()
        elif way == "keyboard":
            term.focus()
        else:
            term.tap()
        assert tip.is_visible() and len(tip.inner_text()) > 20, way
        assert page.url.endswith("first_kernel.html"), way
        page.keyboard.press("Escape")
        assert tip.is_hidden(), way
        page.context.close()


def test_a_figure_enlarges_and_closes(browser: Any, address: str) -> None:
    page, _ = opened(browser, address + "notebooks/first_kernel.html")
    page.locator(".enlarge").first.click()
    assert page.locator("dialog.enlarged img").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("dialog.enlarged").is_hidden()
    page.context.close()


def test_search_finds_words_of_the_text_and_not_of_imports(browser: Any, address: str) -> None:
    page, complaints = opened(browser, address + "search.html?q=coalesced")
    page.wait_for_selector("#search-results li", timeout=20_000)
    page.context.close()
    page, _ = opened(browser, address + "search.html?q=tempfile")
    page.wait_for_function("document.querySelector('#search-results p')?.innerText.length > 10", timeout=20_000)
    assert not [text for text in page.locator("#search-results li").all_inner_texts() if "import" in text]
    assert not complaints
    page.context.close()
