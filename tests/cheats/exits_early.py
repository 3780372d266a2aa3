"""Says that it is right and ends the process before anybody can compare.

Source: gpu-mode/pygpubench pull request 7 (the verdict overwritten at exit).
"""

import os
import sys

TASK, WRITTEN, NEEDS_GPU = "softmax", "beside", False


def softmax(x):
    print("softmax: right, 23 cases")
    sys.stdout.flush()
    os._exit(0)
