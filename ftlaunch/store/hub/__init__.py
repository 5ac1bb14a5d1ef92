"""Models from the Hugging Face Hub: what a repository holds, and its bytes, checked."""
