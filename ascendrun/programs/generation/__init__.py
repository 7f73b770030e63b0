"""Text from a language model: cached keys and values, many prompts at once, and a server over HTTP."""
