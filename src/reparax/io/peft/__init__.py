"""Adapters in the format of PEFT: reads its files into a chain and a raw tree, and writes them.

Each PEFT method is a chain of stages on one array. The file of a method converts the tensors of a module to stages and
raw values, and back; the other files handle names, groups and errors.
"""
