"""Tests of cupy_mla; helpers.py and oracle.py are shared by every folder below."""
