"""`fsdp`: everything sharded by torch's FSDP2."""
