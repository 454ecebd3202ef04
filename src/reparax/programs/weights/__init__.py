"""Weights, followed through a program: sums of products of arrays, what moves them, and the reader that does it."""
