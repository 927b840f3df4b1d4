"""Speed beside the peers of each task, in the same run on the same machine."""
