"""How the tests are run: which of them always, in which order, side by side, and what is said of it meanwhile."""
