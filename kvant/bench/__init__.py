"""How fast: attention, append and prefill over packed pages, measured after they were checked."""
