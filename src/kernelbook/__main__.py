import sys

from kernelbook.lab.cli import main

for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files may be no text
sys.exit(main())
