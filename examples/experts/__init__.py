"""A small mixture of experts that is trained here: adapters on its experts, in files too."""
