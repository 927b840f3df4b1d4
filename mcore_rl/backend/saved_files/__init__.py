"""Files of foreign origin, read without running what is in them."""
