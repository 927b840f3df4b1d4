"""The programs: `mcore-rl` and what it starts. Each is short; the work is done on the floors below."""
