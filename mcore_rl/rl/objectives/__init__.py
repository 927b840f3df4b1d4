"""The mathematics of an RL update: advantages, policy losses and their aggregation."""
