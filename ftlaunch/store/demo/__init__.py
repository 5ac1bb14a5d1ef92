"""The demo model: SmolLM2-135M-Instruct, turned into a small Mixture-of-Experts model on this machine."""
