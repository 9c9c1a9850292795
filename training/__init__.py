"""Provide what every train script needs around its loop, and what no lesson teaches."""
