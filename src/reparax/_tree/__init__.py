"""Trees of parameters: plain data whose key paths say everything, and what is told of them to people."""
