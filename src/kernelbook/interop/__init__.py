"""Other libraries: each optional, and imported only where one of these modules is used."""

from typing import Any


def base_model(model: Any) -> Any:
    """The model of transformers that PEFT has wrapped, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
