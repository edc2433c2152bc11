"""MXFP8 expert-parallel training of Mixture-of-Experts models for PyTorch."""
