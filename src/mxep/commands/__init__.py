"""`mxep convergence`: does training in MXFP8 reach the loss of training in bf16? Several seeds of both, side by side, in pieces."""
