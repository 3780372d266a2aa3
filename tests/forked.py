"""Python programs, each in a process of its own that begins with PyTorch imported, which is most of what its start costs."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

SECONDS = 300  # after which a program is ended


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """It ends when this process does, which has the other end of its input."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, __file__], env=environment, text=True, **pipes)


def python(code: str, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """What ``python -c code`` does in this environment, but for its import of PyTorch."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([code, dict(environment), folder]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess([sys.executable, "-c", code], status, out, err)


def _run(code: str, environment: Mapping[str, str], folder: str) -> int:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        return 1
    return 0


def _serve() -> None:
    sys.path.remove(str(Path(__file__).parent))
    import torch  # noqa: F401

    for line in sys.stdin:
        if (child := os.fork()) == 0:
            signal.alarm(SECONDS)
            status = _run(*json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
