"""EAGLE-3 speculative decoding for GGUF models: the same answer, sooner."""

__version__ = "0.1.0"
