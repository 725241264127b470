"""A tiny trained verifier in the shape of Kimi-K2.5, its chat data, and what makes both."""
