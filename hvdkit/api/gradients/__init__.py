"""The settings of optimizers and tapes: groups of gradients, their codecs, and the checks of parameters."""
