"""The command `convert-ckpt`: find the source, write the other format, verify it, write the report."""
