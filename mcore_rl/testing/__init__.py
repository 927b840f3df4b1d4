"""Conformance: the tests that users give their own engines and programs."""
