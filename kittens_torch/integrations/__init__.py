"""Our attention inside other libraries. Importing this imports none of them."""

from . import diffusers, transformers


def register_when_loaded() -> None:
    """Makes "kittens" known to each of these libraries, now or when it is imported."""
    diffusers.register_when_loaded()
    transformers.register_when_loaded()
