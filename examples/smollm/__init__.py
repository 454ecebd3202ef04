"""SmolLM2-135M-Instruct, a language model that other people trained, here tuned with reparax.

Run: make example
"""
