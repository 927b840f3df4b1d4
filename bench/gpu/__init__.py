"""The checks and measurements of one machine with a GPU; `python -m bench.gpu` runs them all."""
