"""Files of foreign origin, read without running any program in them."""
