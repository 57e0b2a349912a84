"""The command `convert-ckpt`: what its source is, the other format written and proven, the report."""
