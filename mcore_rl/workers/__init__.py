"""The processes of a run: starting ranks, guarding them, ending them together."""
