"""Does racecheck count a barrier that warps reach at different places of the program?

    python tools/evidence/handshake.py --out handshake.json

Three programs of a few lines of PTX. A thread of one warp stores a word in shared memory, another warp loads it. Between the
two lies a barrier of all threads: one instruction that both warps reach, or one instruction for each warp (which is what
Triton's compiler makes of partitions of warps), or none. Only the last has a race. What racecheck says of the second tells
what its reports on partitions of warps are worth.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

BODIES = {
    "one barrier for both": """
    @!%writes bra MEET;
    st.shared.b32 [word], 42;
MEET:
    barrier.sync 1;
    @!%reads bra END;
    ld.shared.b32 %r1, [word];
    st.global.b32 [%rd0], %r1;""",
    "a barrier for each": """
    @%reads bra READER;
    @!%writes bra MEET;
    st.shared.b32 [word], 42;
MEET:
    barrier.sync 1;
    bra END;
READER:
    barrier.sync 1;
    ld.shared.b32 %r1, [word];
    st.global.b32 [%rd0], %r1;""",
    "no barrier": """
    @%reads bra READER;
    @!%writes bra END;
    st.shared.b32 [word], 42;
    bra END;
READER:
    ld.shared.b32 %r1, [word];
    st.global.b32 [%rd0], %r1;""",
}
PTX = """
.version 8.0
.target sm_{target}
.address_size 64
.visible .entry handshake_kernel(.param .u64 out)
{{
    .reg .pred %writes, %reads;
    .reg .b32 %r<2>;
    .reg .b64 %rd<1>;
    .shared .align 4 .b32 word;
    ld.param.u64 %rd0, [out];
    mov.u32 %r0, %tid.x;
    setp.eq.u32 %writes, %r0, 0;
    setp.ge.u32 %reads, %r0, 32;{body}
END:
    ret;
}}
"""


def launch(name: str) -> None:
    """Runs one program on 64 threads, and waits for it."""
    import torch

    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    cuda = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()

    def call(function_: str, *args: object) -> None:
        if code := getattr(cuda, function_)(*args):
            raise SystemExit(f"handshake: {function_} returned {code}")

    call("cuModuleLoadData", ctypes.byref(module), PTX.format(target=10 * major + minor, body=BODIES[name]).encode())
    call("cuModuleGetFunction", ctypes.byref(function), module, b"handshake_kernel")
    pointer = ctypes.c_uint64(out.data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(pointer), ctypes.c_void_p))
    call("cuLaunchKernel", function, 1, 1, 1, 64, 1, 1, 0, None, arguments, None)
    torch.cuda.synchronize()
    print("word", int(out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--launch", choices=tuple(BODIES), help="one program, which is what the sanitizer is given")
    args = parser.parse_args()
    if args.launch:
        launch(args.launch)
        return
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        raise SystemExit("handshake: compute-sanitizer must be in PATH, it comes with CUDA's toolkit")
    told = {}
    for name in BODIES:
        command = [
            sanitizer,
            "--tool",
            "racecheck",
            "--kernel-regex",
            "kns=handshake",
            sys.executable,
            __file__,
            "--launch",
            name,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        text = done.stdout + done.stderr
        found, word = re.search(r"RACECHECK SUMMARY: (.*)", text), re.search(r"^word (\d+)", text, re.M)
        told[name] = {
            "summary": found.group(1) if found else text[-400:],
            "hazards": int(found.group(1).split()[0]) if found else None,
            "word": int(word.group(1)) if word else None,
        }
        print(name, told[name], flush=True)
        if args.out:
            args.out.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
