"""Recognizers of speech that is made here, trained with noise in their weights.

Run: make example-speech
"""
