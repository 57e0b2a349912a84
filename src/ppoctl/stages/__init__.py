"""Each stage of a PPO step, one file each: a function from immutable inputs to one immutable output."""
