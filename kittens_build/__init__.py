"""What setup.py needs to build kittens_torch; used at build time and by the tests, never installed."""
