"""Python programs that begin with what they import: forks of processes that have imported it, where there is no GPU.

To import PyTorch and what stands on it takes seconds, and tests and chapters start hundreds of programs. :func:`started` makes a file
``python`` that stands for this Python, as ``sys.executable``: programs in :data:`KINDS` are forks of a process of their kind, which has
imported the kind's modules in the environment of the first such program, and all others are started as ever.
"""

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# By module or file, "compiled" where kernels are not interpreted: what its process imports, in turn. Not for a program that ends
# when its parent does: that is another process here.
KINDS: dict[str, tuple[str, ...]] = {
    "ipykernel_launcher": (
        # Not matplotlib_inline: it connects figures to the notebook when it is imported, and there is none yet.
        "ipykernel.ipkernel", "ipykernel.kernelapp", "ipykernel.debugger", "pandas", "matplotlib.pyplot",
    ),
    "kernelbook.lab.compiled compiled": ("kernelbook.lab.compiled", "torch._dynamo"),
    "kernelbook.lab.judge_worker": ("kernelbook.lab.judge_worker", "torch._dynamo"),
    "kernelbook.lab.judge_worker compiled": ("kernelbook.lab.judge_worker", "torch._dynamo"),
    "kernelbook.lab.older": ("kernelbook.lab.older", "torch._dynamo"),
    "torch.distributed.run": ("torch.distributed.run",),
    "several_ranks.py": (
        "kernelbook.lab.bench.several_gpus", "kernelbook.train.parallel", "torch._dynamo", "torch.distributed.fsdp", "peft", "kernelbook.interop.transformers",
    ),
}  # fmt: skip

REAL = sys.executable
CLIENT = """#!{python} -IS
import os, socket, sys

arguments = sys.argv[1:]
what = [each for each in arguments if each != "-u"][:2] or [""]
name = what[-1] if what[0] == "-m" else os.path.basename(what[0])
name += " compiled" if os.environ.get("TRITON_INTERPRET") == "0" else ""
server = socket.socket(socket.AF_UNIX)
try:
    server.connect(os.path.join(os.path.dirname(__file__), name or "-"))
except OSError:
    os.execv({python!r}, [{python!r}, *arguments])
import json, signal

numbers = [int(each) for each in os.listdir("/proc/self/fd")]
numbers = [each for each in numbers if each != server.fileno() and os.path.exists(f"/proc/self/fd/{{each}}")]
asked = json.dumps([arguments, os.getcwd(), dict(os.environ), numbers]).encode()
socket.send_fds(server, [len(asked).to_bytes(8, "big")], numbers)
server.sendall(asked)
def answer():
    number = server.recv(8, socket.MSG_WAITALL)
    if len(number) < 8:
        sys.exit("the process that was to be forked has ended")
    return int.from_bytes(number, "big", signed=True)

program = answer()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(program, number))
status = answer()
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextlib.contextmanager
def started() -> Iterator[str]:
    """The file that stands for this Python, one for all programs within; where there is a GPU this Python itself."""
    known = REAL if shutil.which("nvidia-smi") is not None else os.environ.get("WARM_PYTHON", "")
    if Path(known).is_file():
        yield known
        return
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "python")
        file.write_text(CLIENT.format(python=REAL))
        file.chmod(0o700)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([REAL, __file__, folder], env=environment, **pipes) as server:
            assert server.stdin is not None and server.stdout is not None
            server.stdout.readline()  # it listens
            os.environ["WARM_PYTHON"] = str(file)
            yield str(file)
            del os.environ["WARM_PYTHON"]
            server.stdin.close()


def _main(folder: str) -> None:
    """Listens for each kind, in a process of its own; all of them end with the one that began them."""
    sys.path.remove(str(Path(__file__).parent))
    import signal

    import numpy  # noqa: F401
    import torch  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.executable = str(Path(folder, "python"))
    listeners = {}
    for kind in KINDS:
        listeners[kind] = socket.socket(socket.AF_UNIX)
        listeners[kind].bind(str(Path(folder, kind)))
        listeners[kind].listen(64)
    print(flush=True)
    os.close(1)
    os.dup(2)  # no program's output is anybody's input here
    for kind, listener in listeners.items():
        if os.fork() == 0:
            _serve(kind, listener)
    os.read(0, 1)


def _serve(kind: str, listener: socket.socket) -> None:
    import gc
    import importlib
    import json
    import select

    ready = False
    while listener in select.select([0, listener], [], [])[0]:
        connection, _ = listener.accept()
        size, descriptors, _, _ = socket.recv_fds(connection, 8, 250)
        arguments, folder, environment, numbers = json.loads(
            connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        )
        if not ready:
            ready, own = True, list(sys.path)
            _settle(environment, own)
            for module in KINDS[kind]:
                with contextlib.suppress(ImportError):  # a program that needs it will say so
                    importlib.import_module(module)
            gc.collect()
            gc.freeze()
        if os.fork() == 0:
            listener.close()
            _watch(connection, descriptors, numbers, functools.partial(_run, arguments, folder, environment, own))
        connection.close()
        for each in descriptors:
            os.close(each)
    os._exit(0)


def _settle(environment: dict[str, str], own: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *own]
    if "MPLBACKEND" in environment and "matplotlib" in sys.modules:  # which reads it once
        sys.modules["matplotlib"].rcParams["backend"] = environment["MPLBACKEND"]


def _watch(connection: socket.socket, descriptors: list[int], numbers: list[int], run: Callable[[], None]) -> None:
    """Forks once more: this process says how the program ended, and ends it where nobody waits for it any more."""
    import fcntl
    import select
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kept, ended = os.pipe()
    program = os.fork()
    if program == 0:
        os.setsid()
        connection.close()
        os.close(kept)
        fcntl.fcntl(ended, fcntl.F_DUPFD_CLOEXEC, 600)  # open until the program ends
        os.close(ended)
        moved = [fcntl.fcntl(each, fcntl.F_DUPFD, 300) for each in descriptors]
        for each in descriptors:
            os.close(each)
        for each, number in zip(moved, numbers, strict=True):
            os.dup2(each, number)
            os.close(each)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    os.close(ended)
    for each in descriptors:
        os.close(each)
    with contextlib.suppress(OSError):  # who waits may have ended before
        connection.sendall(program.to_bytes(8, "big"))
    if connection in select.select([kept, connection], [], [])[0]:
        for kill in (os.killpg, os.kill):  # it may have no group of its own yet
            with contextlib.suppress(ProcessLookupError):
                kill(program, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(status.to_bytes(8, "big", signed=True))
    os._exit(0)


def _run(arguments: list[str], folder: str, environment: dict[str, str], own: list[str]) -> None:
    """What Python does with these arguments."""
    import atexit
    import runpy
    import signal
    import threading
    import traceback
    import warnings

    import torch

    os.chdir(folder)
    _settle(environment, own)
    if "JPY_PARENT_PID" in os.environ:
        os.environ["JPY_PARENT_PID"] = str(os.getppid())
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    if arguments[0] == "-u":
        arguments.pop(0)
        sys.stdout.reconfigure(write_through=True)
    status = 0
    try:
        if arguments[0] == "-m":
            sys.path.insert(0, folder)
            sys.argv = arguments[1:]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 255)


if __name__ == "__main__":
    _main(sys.argv[1])
