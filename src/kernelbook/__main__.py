import sys

from kernelbook.lab.cli import main

sys.exit(main())
