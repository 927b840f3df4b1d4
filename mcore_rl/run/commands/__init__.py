"""The commands of `mcore-rl`: `table` has all, the other files their arguments by topic."""
