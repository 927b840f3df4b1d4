"""The commands of `mcore-rl`: `table` lists all of them, and the other files define their arguments by topic."""
