import sys

try:
    from kernelbook.lab.cli import main
except ModuleNotFoundError as error:
    if error.name not in ("pandas", "tabulate", "tqdm"):
        raise
    sys.exit(f"kernelbook: the commands need {error.name}, which is not installed: pip install 'kernelbook[commands]'")

sys.exit(main())
