"""Forms of a weight in memory and weights in them: quantised, float8, and several matrices stacked into one."""
