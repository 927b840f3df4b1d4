"""The programs: `mcore-rl` and the programs that it starts. Each is short; the packages below do the work."""
