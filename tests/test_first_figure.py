"""The figure with which README and book begin: drawn from the rows that are recorded now."""

from programs import program


def test_it_is_not_older_than_the_results() -> None:
    tool = program("first_figure")
    drawn = f"drawn from rows {tool.digest()} of" in tool.PICTURE.read_text()
    assert drawn, "book/results changed: run 'python tools/first_figure.py'"
