"""Our attention inside other libraries. Importing this imports none of them."""

from . import diffusers, flop_counter, transformers


def register_when_loaded() -> None:
    """Makes us known to each of these libraries, now or when it is imported."""
    for library in (diffusers, flop_counter, transformers):
        library.register_when_loaded()
