"""A call of the rotary embeddings, which models of transformers get."""

from kernelbook.cases import Case, draw
from kernelbook.interop.rotary import rotate

MODULES = {
    "rotate": Case(
        function=rotate, grads=("q", "k"), but=("forward mode",),  # transformers' own function is called then
        given=lambda: {"q": draw(1, 2, 4, 16), "k": draw(1, 1, 4, 16), "cos": draw(1, 4, 16), "sin": draw(1, 4, 16)},
    ),
}  # fmt: skip
