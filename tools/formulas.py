"""A Sphinx extension that writes formulas as MathML, which browsers show by themselves: pages need no script for them.

Formulas are converted when the book is built; one that the converter does not understand is a warning.
"""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

LOGGER = logging.getLogger(__name__)
WORD = re.compile(r"\\(mathrm|mathtt)(?:\{([^{}]*)\}| ?([a-zA-Z]))")


def _word(match: re.Match[str]) -> str:
    text = (match[2] or match[3]).replace(r"\_", "_").replace(r"\,", " ").replace("\\ ", " ")
    return rf"\text{{{'tt:' if match[1] == 'mathtt' else ''}{text}}}"


def mathml(tex: str, display: str, node: nodes.Node | None = None) -> str:
    """``tex`` as a ``math`` element; warns where a command is left over.

    The converter takes words letter by letter, and does not know ``aligned`` and ``\\arg``.
    """
    plain = WORD.sub(_word, tex).replace("{aligned}", "{align*}").replace(r"\arg\min", r"\operatorname{argmin}")
    markup = convert(plain, display=display)
    if left := re.findall(r"\\[a-zA-Z]+|<mi>&</mi>", markup):
        LOGGER.warning("formula: not understood: %s in %s", ", ".join(left), tex, location=node)
    return str(re.sub(r"<mtext>tt:(.*?)</mtext>", r'<mtext class="tt">\1</mtext>', markup))


def visit_math(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(f'<span class="math">{mathml(node.astext(), "inline", node)}</span>')
    raise nodes.SkipNode


def visit_math_block(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math"))
    # Formulas beside each other stand below each other on a narrow screen.
    tex = node.astext().strip()
    parts = [tex] if "{aligned}" in tex else re.split(r"\\qquad\b", tex)
    self.body.append(f'<div class="formula">{"".join(mathml(part, "block", node) for part in parts)}</div>')
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append("</div>")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", inline_renderers=(visit_math, None), block_renderers=(visit_math_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
