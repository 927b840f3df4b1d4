"""Advantages, policy losses and their aggregation: the mathematics of an RL update."""
