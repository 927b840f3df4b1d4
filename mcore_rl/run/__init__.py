"""The programs: `mcore-rl` and the programs that it starts. Each is short; the work is done on the floors below."""
