"""Declarations that several families share."""
