"""What an attention backend of any paged server needs beside the operations: overlay rows of sequences that have no name, the order
in which a step is written and read, warm-up, tensor-parallel shards. No server is imported here; engines/vllm/ adapts one."""
