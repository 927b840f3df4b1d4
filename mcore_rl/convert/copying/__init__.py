"""One copier for both formats: it moves bytes by a plan, in workers, with checksums, and can be resumed."""
