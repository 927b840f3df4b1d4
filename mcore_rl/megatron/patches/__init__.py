"""Every change to Megatron-Core, each with the versions it holds for, its cause, and when it can go."""
