"""rankscope: profiling of distributed training."""
