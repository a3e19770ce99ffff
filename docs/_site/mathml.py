"""Formulas as MathML, which browsers draw without a script from another server."""

from docutils import nodes
from latex2mathml import converter


def setup(app):
    """Register the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))


def _inline(writer, node):
    writer.body.append(converter.convert(node.astext()))
    raise _done()


def _block(writer, node):
    formula = converter.convert(node.astext(), display="block")
    writer.body.append(f'<div class="formula" tabindex="0">{formula}</div>')
    raise _done()


def _done():
    return nodes.SkipNode()
