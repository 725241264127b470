"""The engines that run a verifier: vLLM in a process of its own, and transformers."""
