"""Our attention inside other libraries. Importing this imports none of them."""
