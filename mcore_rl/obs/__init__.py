"""What a run tells while it goes on: metrics, sinks, timing, memory, FLOPs, plots."""
