"""Records that stages exchange. A record is immutable, checks its own invariants, and stores tensors on the response
grid."""
