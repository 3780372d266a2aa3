"""A program that is a fork of a process which has imported PyTorch is one like any other."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_python

from kernelbook import runtime

pytestmark = pytest.mark.skipif(runtime.DEVICE.type == "cuda", reason="without a GPU only")
PROGRAM = """
import os, sys
print(__name__, sys.argv[1], os.getcwd(), os.environ["ASKED"], sys.stdin.read(), "torch" in sys.modules)
print(os.getpid(), file=sys.stderr)
os.write(int(sys.argv[2]), b"to a file of its own")
exec(sys.argv[1])
"""
SLEEPS = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)"


def ends(pid: int) -> bool:
    return any(not Path(f"/proc/{pid}").exists() or time.sleep(0.1) for _ in range(100))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('said')", 1),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_it_ends_as_it_would(tmp_path: Path, code: str, status: int) -> None:
    program = tmp_path / "several_ranks.py"
    program.write_text(PROGRAM)
    for python in (warm_python.REAL, sys.executable):
        read, write = os.pipe()
        done = subprocess.run(
            [python, program, code, str(write)], cwd=tmp_path, env=os.environ | {"ASKED": "asked"},
            input="given", pass_fds=[write], capture_output=True, text=True, check=False,
        )  # fmt: skip
        os.close(write)
        assert done.returncode == status
        assert done.stdout == f"__main__ {code} {tmp_path} asked given {python == sys.executable}\n"
        assert os.read(read, 100) == b"to a file of its own" and os.read(read, 1) == b""
        assert ("ZeroDivisionError" in done.stderr) == ("/" in code) and ("said" in done.stderr) == ("said" in code)
        os.close(read)
        assert ends(int(done.stderr.split()[0]))


def test_it_ends_with_who_waits_for_it_and_by_its_signals(tmp_path: Path) -> None:
    program = tmp_path / "several_ranks.py"
    program.write_text(SLEEPS)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(
            [sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as started:
            pid = int(started.stdout.readline())
            started.send_signal(number)
            assert started.wait(10) == -number
            assert ends(pid)


def test_it_ends_where_who_waits_has_ended_before_it_began(tmp_path: Path) -> None:
    program = tmp_path / "several_ranks.py"
    program.write_text(SLEEPS)
    read, write = os.pipe()
    with socket.socket(socket.AF_UNIX) as waits:
        waits.connect(str(Path(sys.executable).with_name(program.name)))
        asked = json.dumps([[str(program)], str(tmp_path), dict(os.environ), [1]]).encode()
        socket.send_fds(waits, [len(asked).to_bytes(8, "big")], [write])
        waits.sendall(asked)
    os.close(write)
    with open(read) as output:
        assert not (pid := output.readline()) or ends(int(pid))


def test_another_program_is_started_as_ever() -> None:
    code = "import sys; print(sys.executable, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{warm_python.REAL} False\n"
