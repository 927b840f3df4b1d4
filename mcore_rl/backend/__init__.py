"""What differs between a CPU on gloo and a GPU on NCCL, and between versions of Megatron-Core."""
