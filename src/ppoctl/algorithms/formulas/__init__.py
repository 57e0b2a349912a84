"""The formulas of PPO as pure functions of tensors on the response grid."""
