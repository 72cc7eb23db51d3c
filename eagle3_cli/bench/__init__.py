"""Compare ways of answering the same prompts: plain, chains, trees, and llama.cpp's own server."""
