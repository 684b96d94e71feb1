"""Side-by-side measurements: rankscope, torch alone and verl, on the same work in the same run."""
