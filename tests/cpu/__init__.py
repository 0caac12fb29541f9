"""Tests that need no GPU; tests of other backends import the shared ones from here."""
