"""What each operator computes, reads, writes and sends: one small file a family."""
