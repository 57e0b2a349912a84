"""Records that stages exchange: immutable, self-checking, on the response grid."""
