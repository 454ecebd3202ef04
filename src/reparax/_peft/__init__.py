"""Adapters as PEFT keeps them: its files read into a chain and a raw tree, and written from these.

Each method of PEFT is a chain of stages on one array. Its file has, both ways, the stages and raw values of the tensors
of a module; all else is names, groups and errors.
"""
