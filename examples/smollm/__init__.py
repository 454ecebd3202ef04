"""SmolLM2-135M-Instruct, a language model that other people trained, tuned and compressed with reparax.

Run: make example
"""
