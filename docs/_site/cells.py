"""Cells of the site's notebooks as a reader can paste them."""

from docutils import nodes

MAGIC = "%%writefile"


def setup(app):
    """Take the first line of cells that write a file out of the pages that Sphinx has read."""
    app.connect("doctree-read", show_files)


def show_files(app, doctree):
    """Remove the line `%%writefile NAME`, which is no Python; the page's text names the file."""
    for block in doctree.findall(nodes.literal_block):
        if block.astext().startswith(MAGIC):
            text = block.astext().partition("\n")[2]
            block[:] = [nodes.Text(text)]
            block.rawsource = text  # Sphinx highlights a block only if both are equal
            block["language"] = "python"
