"""The platform: CPU on gloo or GPU on NCCL, the ranks as processes, the differences between versions of Megatron."""
