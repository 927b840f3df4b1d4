"""Worker processes for user-defined functions: rewards, environments, tools."""
