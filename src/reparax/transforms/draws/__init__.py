"""Noise for each example, drawn for the results of products instead of the weights.

``_drawing`` follows noisy weights through a program to their products; ``_noisy`` gives the mean and the variance of
these products.
"""
