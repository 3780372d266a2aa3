"""What does racecheck make of the ways in which Triton's compiler hands words to its partitions of warps?

    python tools/evidence/handshake.py --out handshake.json

Programs of a few lines of PTX: four warps store a word in shared memory, others load it. Between the two lies a barrier of
all threads, or none: only where the name says so may a word be read that is not there yet. What racecheck says of the others
tells what its reports on partitions of warps are worth.
"""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

from common import command_line, keep, output_of, sanitizer

BODIES = {
    "one barrier that both reach": """
    @!%first bra MEET;
    st.shared.b32 [word], 42;
MEET:
    barrier.sync 1;
    @!%reads bra END;
    ld.shared.b32 %r1, [word];
    st.global.b32 [%rd0], %r1;""",
    "a barrier for each side": """
    @%reads bra READER;
    @!%first bra MEET;
    st.shared.b32 [word], 42;
MEET:
    barrier.sync 1;
    bra END;
READER:
    barrier.sync 1;
    ld.shared.b32 %r1, [word];
    st.global.b32 [%rd0], %r1;""",
    "a barrier for each side, and four warps store the same word": """
    @%reads bra READER;
    st.shared.b32 [word], 42;
    barrier.sync 1;
    bra END;
READER:
    barrier.sync 1;
    ld.shared.b32 %r1, [word];
    st.global.b32 [%rd0], %r1;""",
    "an mbarrier, on which a thread arrives after its four warps have met": """
    @!%first bra THERE;
    mbarrier.init.shared.b64 [full], 1;
THERE:
    barrier.sync 1;
    @%reads bra READER;
    st.shared.b32 [word], 42;
    bar.sync 2, 128;
    @%first mbarrier.arrive.shared.b64 %rd1, [full];
    bra END;
READER:
    mbarrier.try_wait.parity.shared.b64 %ends, [full], 0;
    @!%ends bra READER;
    ld.shared.b32 %r1, [word];
    st.global.b32 [%rd0], %r1;""",
    "no barrier": """
    @%reads bra READER;
    @!%first bra END;
    st.shared.b32 [word], 42;
    bra END;
READER:
    ld.shared.b32 %r1, [word];
    st.global.b32 [%rd0], %r1;""",
}
# As the compiler does it for a kernel of partitions: the first four warps say in ``state`` what each other warp has to do, and
# leave its arguments in ``word``; the others wait for that in a loop, do it, and wait again, until they are told to end.
LOOP = """
    @%reads bra READER;
    st.shared.v2.b32 [state], {{0, 0}};
    st.shared.b32 [word], 42;
    barrier.sync 1;
    {less}
    {held}
    {alone}
    {held}
    st.shared.v2.b32 [state], {{67372036, 67372036}};
    barrier.sync 1;
    bra END;
READER:
    {few}
    barrier.sync 1;
    ld.shared.u8 %r1, [%r2];
    setp.eq.u32 %ends, %r1, 4;
    @%ends bra END;
    {more}
    ld.shared.b32 %r1, [word];
    {held}
    @!%second bra SKIP;
    {pair}
SKIP:
    st.global.b32 [%rd0], %r1;
    {held}
    bra READER;"""
PLAIN = dict.fromkeys(("less", "alone", "few", "more", "pair"), "") | {"held": "barrier.sync 1;"}
PARTS = {"alone": "bar.sync 0, 128;\n    bar.sync 0, 128;", "pair": "bar.sync 2, 128;\n    bar.sync 2, 128;"}
REGISTERS = {
    "less": "setmaxnreg.dec.sync.aligned.u32 32;",
    "few": "setmaxnreg.dec.sync.aligned.u32 24;",
    "more": "setmaxnreg.inc.sync.aligned.u32 32;",
}
BODIES |= {
    "the compiler's loop": LOOP.format(**PLAIN),
    "the compiler's loop, and barriers of four warps within it": LOOP.format(**PLAIN | PARTS),
    "the compiler's loop, and registers that change hands": LOOP.format(**PLAIN | REGISTERS),
    "the compiler's loop, with both": LOOP.format(**PLAIN | PARTS | REGISTERS),
    "the compiler's loop, and nobody waits for the readers": LOOP.format(**PLAIN | {"held": ""}),
}
# What initcheck is asked: memory that nobody wrote before is stored to in two ways, and then loaded.
STORED = {
    "four words, stored by a thread": """
    @!%first bra END;
    mov.b32 %r1, 42;
    st.global.v4.b32 [%rd0], {%r1, %r1, %r1, %r1};
    ld.global.b32 %r2, [%rd0 + 4];
    st.global.b32 [%rd0], %r2;""",
    "four words, copied out of shared memory as TMA does": """
    @!%first bra END;
    mov.b32 %r1, 42;
    st.shared.v4.b32 [state], {%r1, %r1, %r1, %r1};
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%rd0], [state], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    ld.global.b32 %r2, [%rd0 + 4];
    st.global.b32 [%rd0], %r2;""",
}
PTX = """
.version 8.0
.target sm_{target}
.address_size 64
.visible .entry handshake_kernel(.param .u64 out)
.maxnreg 112
{{
    .reg .pred %first, %reads, %second, %ends;
    .reg .b32 %r<4>;
    .reg .b64 %rd<2>;
    .shared .align 8 .b64 full;
    .shared .align 4 .b32 word;
    .shared .align 16 .b8 state[16];
    ld.param.u64 %rd0, [out];
    mov.u32 %r0, %tid.x;
    setp.eq.u32 %first, %r0, 0;
    setp.ge.u32 %reads, %r0, 128;
    setp.lt.u32 %second, %r0, 256;
    shr.u32 %r2, %r0, 5;
    mov.u32 %r3, state;
    add.u32 %r2, %r2, %r3;
    sub.u32 %r2, %r2, 4;{body}
END:
    ret;
}}
"""


def launch(name: str) -> None:
    """Runs one program in 32 blocks, of eight warps or, if it is a loop, of twelve, and waits for it."""
    import torch

    make = torch.empty if name in STORED else torch.zeros  # that nobody wrote, for initcheck
    out = make(4, dtype=torch.int32, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    target = f"{major}{minor}" + "a" * (major >= 9)
    cuda = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()

    def call(function_: str, *args: object) -> None:
        if code := getattr(cuda, function_)(*args):
            raise SystemExit(f"handshake: {function_} returned {code}")

    call("cuModuleLoadData", ctypes.byref(module), PTX.format(target=target, body=(BODIES | STORED)[name]).encode())
    call("cuModuleGetFunction", ctypes.byref(function), module, b"handshake_kernel")
    grid, block = (1 if name in STORED else 32, 1, 1), (384 if "loop" in name else 256, 1, 1)
    pointer = ctypes.c_uint64(out.data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(pointer), ctypes.c_void_p))
    call("cuLaunchKernel", function, *grid, *block, 0, None, arguments, None)
    torch.cuda.synchronize()
    print("word", int(out[0]))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--launch", choices=(*BODIES, *STORED), help="one program, which is what the sanitizer is given"
    )
    args = parser.parse_args()
    if args.launch:
        launch(args.launch)
        return
    told, running = {}, {}
    for name in (*BODIES, *STORED):
        tool = "initcheck" if name in STORED else "racecheck"
        watch = [sanitizer(), "--tool", tool, "--kernel-regex", "kns=handshake"]
        running[name] = tool, output_of([*watch, sys.executable, __file__, "--launch", name])
    for name, (tool, process) in running.items():
        try:
            text = process.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:  # it waits for readers that have ended, which is what its name says
            process.kill()
            text = process.communicate()[0] + "\nnever ended"
        found, word = re.search(r"(?:RACECHECK|ERROR) SUMMARY: (.*)", text), re.search(r"^word (\d+)", text, re.M)
        told[name] = {
            "tool": tool,
            "summary": found.group(1) if found else text[-400:],
            "hazards": int(found.group(1).split()[0]) if found else None,
            "word": int(word.group(1)) if word else None,
        }
        print(name, told[name], flush=True)
        keep(args.out, told)


if __name__ == "__main__":
    main()
