"""Forms of a weight in memory: quantised, float8, and several matrices stacked into one."""
