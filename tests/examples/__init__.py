"""Worked examples: scripts that tests run."""
