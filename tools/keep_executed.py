"""A plugin of pytest: what nbval executes is kept for the book, chapter by chapter, where every cell passed.

usage: PYTHONPATH=tools python -m pytest -p keep_executed --nbval notebooks
"""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import build_book
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionComplete


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # once, before workers begin, which inherit the environment
        stack = contextlib.ExitStack()
        config.add_cleanup(stack.close)
        stack.enter_context(build_book.kernels("--HistoryManager.hist_file=:memory:"))  # as nbclient has it
        build_book.open_cache().list_cache_records()  # makes its file: two workers could not


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    if item.cell_num == 0:
        chapter = item.parent
        chapter.begun, chapter.passed = time.perf_counter(), 0
        chapter.reader = NotebookClient(chapter.nb, record_timing=False)
        setup = chapter.setup

        def start() -> None:
            os.environ.pop("PYTEST_CURRENT_TEST")  # with it a kernel leaves out what is written past Python
            setup()
            chapter.kernel.execute_cell_input = execute

        def execute(source: str, allow_stdin: bool) -> str:
            """nbval's, but with a history: without one a semicolon hides no value."""
            return str(chapter.kernel.kc.execute(source, allow_stdin=allow_stdin, stop_on_error=False))

        chapter.setup = start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """nbval joins outputs, to compare them. For a page nbclient reads them, from the same messages."""
    chapter, cell, messages = item.parent, item.cell, []

    def receive(timeout: float) -> Any:
        messages.append(chapter.kernel.get_message("iopub", timeout))
        return messages[-1]

    chapter.get_kernel_message = receive
    yield
    chapter.reader.clear_before_next_output = False
    own = messages[-1]["parent_header"]["msg_id"]  # the last says that the cell has ended
    with contextlib.suppress(CellExecutionComplete):
        for message in messages:
            if message["parent_header"].get("msg_id") == own:
                chapter.reader.process_message(message, cell, chapter.nb.cells.index(cell))
    chapter.passed += 1
    if chapter.passed == sum(cell.cell_type == "code" for cell in chapter.nb.cells):
        reply = chapter.kernel.kc.kernel_info(reply=True, timeout=60)
        chapter.nb.metadata.language_info = reply["content"]["language_info"]
        cache = build_book.get_cache(str(build_book.EXECUTED))
        build_book.keep(cache, chapter.path, chapter.nb, time.perf_counter() - chapter.begun)
